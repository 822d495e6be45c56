"""Whether there are kernels in Triton for the GPU of this machine, and these."""

import functools
import os

import torch

from moebatch.layout.fused import attends_in_place, chooses_at_once, middle_of, steps_at_once
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.gpu.gates import GpuGates
from moebatch.model.gpu.rows import GpuRows
from moebatch.quoting import named_reason
from moebatch.spec.model.recurrence import Recurrence
from moebatch.spec.model.shape import ModelShape

SWITCH = "MOEBATCH_TRITON"
"""Environment variable: ``0`` leaves everything to torch."""


def rows_on(device: torch.device) -> GpuRows | None:
    """Those that go through rows; None where torch does, or a CPU."""
    return GpuRows() if _are_for(device) else None


def grouped_experts(shape: ModelShape, device: torch.device) -> GroupedExperts | None:
    """Those that compute experts of few rows together; None where each is computed alone."""
    middle = middle_of(shape)
    if middle is None or not _are_for(device):
        return None
    return GroupedExperts(middle)


def attends_single(shape: ModelShape, device: torch.device) -> bool:
    """Whether a kernel attends for tokens which decode, in place; else torch gathers what they see,
    or a CPU does."""
    return attends_in_place(shape) and _are_for(device)


def takes_steps(recurrence: Recurrence, device: torch.device) -> bool:
    """Whether a kernel takes the next token of each sequence; else torch does, or a CPU."""
    return steps_at_once(recurrence) and _are_for(device)


def gates_on(shape: ModelShape, device: torch.device) -> GpuGates | None:
    """Those that choose experts and group tokens by them; None where torch does."""
    return GpuGates() if chooses_at_once(shape) and _are_for(device) else None


def _are_for(device: torch.device) -> bool:
    return device.type == "cuda" and prepare() is None


def prepare() -> str | None:
    """Has the kernels compiled, which takes seconds once, and compares them with torch. Why torch
    does their work; None if not. No reason is given where there is no GPU: ''."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    return _checked() if torch.cuda.is_available() else ""


@functools.cache
def _checked() -> str | None:
    try:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return "the GPU is older than compute capability 8.0"
        from moebatch.model.gpu.check import differences

        return differences(torch.device("cuda"))
    except Exception as error:
        # A compiler and a driver of other makers fail in ways that nobody can list.
        return f"Triton: {named_reason(error)}"
