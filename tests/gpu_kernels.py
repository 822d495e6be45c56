"""The kernels in Triton for tests: on the GPU where there is one, or interpreted on the CPU."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from moebatch.model import elementwise
from moebatch.model.gpu import attention, delta_steps, experts, gates, loader, rows, scan_steps
from moebatch.model.gpu.rows import GpuRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Launch = Callable[..., None]


def use_gpu_kernels(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Decoders that are made from now on use them, whatever device they are on; how often each is
    launched."""
    patch.setattr(elementwise, "_kernels_on", lambda device: GpuRows())
    patch.setattr(loader, "are_for", lambda device: True)
    launch, one_at_a_time = rows.launch, threading.Lock()
    launched: Counter[str] = Counter()

    def alone(name: str, *arguments: Any, **options: Any) -> None:
        with one_at_a_time:  # Triton's interpreter is for one thread
            launched[name] += 1
            launch(name, *arguments, **options)

    use_launch(patch, alone)
    return launched


def _mend_interpreter() -> None:
    """Triton's interpreter cuts bfloat16 off where GPUs round, and does not multiply it."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(numbers: Any, before: Any, after: Any, mode: Any) -> Any:
        if (before, after) != (tl.float32, tl.bfloat16):
            return convert(numbers, before, after, mode)
        exact = torch.from_numpy(np.ascontiguousarray(numbers))
        return exact.bfloat16().view(torch.uint16).numpy()

    def multiplied(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (builder.cast_impl(each, tl.float32) for each in (a, b))
        return dot(builder, a, b, *others)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = multiplied


def use_launch(patch: pytest.MonkeyPatch, launch: Launch) -> None:
    """Kernels are launched so."""
    for module in (rows, gates, experts, attention, delta_steps, scan_steps):
        patch.setattr(module, "launch", launch)


if DEVICE.type == "cpu":
    _mend_interpreter()
