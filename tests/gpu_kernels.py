"""The kernels in Triton for tests: on the GPU where there is one, or interpreted on the CPU."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from moebatch.layout.fused import attends_in_place, groups_experts
from moebatch.model import batch, decoder, elementwise
from moebatch.model.attention import core
from moebatch.model.gpu import attention, experts, rows
from moebatch.model.gpu.attention import SingleAttention
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.gpu.rows import GpuRows
from moebatch.spec.model.shape import ModelShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Launch = Callable[..., None]


def use_gpu_kernels(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Decoders that are made from now on use them, whatever device they are on; how often each is
    launched."""
    patch.setattr(elementwise, "_kernels_on", lambda device: GpuRows())
    for module in (batch, core):
        patch.setattr(module, "single_attention", partial(_made, attends_in_place, SingleAttention))
    patch.setattr(decoder, "grouped_experts", partial(_made, groups_experts, GroupedExperts))
    launch, one_at_a_time = rows.launch, threading.Lock()
    launched: Counter[str] = Counter()

    def alone(name: str, *arguments: Any, **options: Any) -> None:
        with one_at_a_time:  # Triton's interpreter is for one thread
            launched[name] += 1
            launch(name, *arguments, **options)

    use_launch(patch, alone)
    return launched


def _made(
    suits: Callable[[ModelShape], bool],
    make: Callable[[], object],
    shape: ModelShape,
    device: torch.device,
) -> object:
    return make() if suits(shape) else None


def use_launch(patch: pytest.MonkeyPatch, launch: Launch) -> None:
    """Kernels are launched so."""
    for module in (rows, experts, attention):
        patch.setattr(module, "launch", launch)
