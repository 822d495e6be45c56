"""Whether there are kernels in Triton for the GPU of this machine, and these."""

import functools
import os

import torch

from moebatch.layout.fused import attends_in_place
from moebatch.quoting import named_reason
from moebatch.spec.model.shape import ModelShape

SWITCH = "MOEBATCH_TRITON"
"""Environment variable: ``0`` leaves everything to torch."""


def attends_single(shape: ModelShape, device: torch.device) -> bool:
    """Whether a kernel attends for tokens which decode, in place; else torch gathers what they see,
    or a CPU does."""
    return attends_in_place(shape) and are_for(device)


def are_for(device: torch.device) -> bool:
    """Whether there are kernels for it; else torch does their work, or a CPU."""
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
