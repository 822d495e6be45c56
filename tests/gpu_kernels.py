"""The kernels in Triton for tests: on the GPU where there is one, or interpreted on the CPU."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebatch.model import batch, decoder, elementwise
from moebatch.model.attention import core
from moebatch.model.gpu import attention, experts, rows
from moebatch.model.gpu.attention import SingleAttention
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.gpu.rows import GpuRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Launch = Callable[..., None]


def use_gpu_kernels(patch: pytest.MonkeyPatch) -> None:
    """Decoders that are made from now on use them, whatever device they are on."""
    patch.setattr(elementwise, "_kernels_on", lambda device: GpuRows())
    for module in (batch, core):
        patch.setattr(module, "single_attention_on", lambda device: SingleAttention())
    patch.setattr(decoder, "grouped_experts_on", lambda device: GroupedExperts())
    launch, one_at_a_time = rows.launch, threading.Lock()

    def alone(*arguments: Any, **options: Any) -> None:
        with one_at_a_time:  # Triton's interpreter is for one thread
            launch(*arguments, **options)

    use_launch(patch, alone)


def use_launch(patch: pytest.MonkeyPatch, launch: Launch) -> None:
    """Kernels are launched so."""
    for module in (rows, experts, attention):
        patch.setattr(module, "launch", launch)
