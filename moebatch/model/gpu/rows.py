"""The kernels that go through rows of numbers, as `Elementwise` asks for them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moebatch.model.routing.tokens import ExpertTokens
from moebatch.spec.model.blocks import ClampedGate

FLOATS: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
"""Numbers that kernels compute with, as these are told of them."""
_LARGEST_BLOCK = 16384
"""Numbers of a row that one program holds."""
_GATE_BLOCK = 1024
_CLAMPING = ("most_gate", "most_activated", "limit", "alpha", "added")
"""What a kernel has to know of a `ClampedGate`."""


class GpuRows:
    """`RowKernels` on a GPU."""

    @staticmethod
    def suits(*tensors: Tensor | None) -> bool:
        there = [tensor for tensor in tensors if tensor is not None]
        dtype = there[0].dtype
        alike = all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in there)
        widths = (tensor.shape[-1] for tensor in there)
        return alike and dtype in FLOATS and max(widths) <= _LARGEST_BLOCK

    def gate(self, gate_MF: Tensor, up_MF: Tensor, clamped: ClampedGate | None) -> None:
        count = gate_MF.numel()
        grid = (math.ceil(count / _GATE_BLOCK),)
        options = clamping(clamped)
        self._run("gate_rows", grid, gate_MF, up_MF, count, block=_GATE_BLOCK, **options)

    def place(
        self, y_MD: Tensor, tokens: ExpertTokens, outputs_TKD: Tensor, weights_TK: Tensor
    ) -> None:
        (num_rows, width), num_choices = y_MD.shape, outputs_TKD.shape[1]
        tensors = outputs_TKD, y_MD, weights_TK, *(each.contiguous() for each in tokens)
        self._run("place", (num_rows,), *tensors, num_choices, width, block=block_of(width))

    def add(self, x_MD: Tensor, scale: float, first: Tensor, second: Tensor | None) -> None:
        num_rows, width = x_MD.shape
        num_parts = first.shape[1] if first.dim() == 3 else 1
        tensors = x_MD, first, first if second is None else second
        options = {"has_second": second is not None, "block": block_of(width)}
        self._run("add", (num_rows,), *tensors, num_parts, width, scale, **options)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        num_parts, width = math.prod(x.shape[1:-1]), x.shape[-1]
        sizes = x.stride(0), eps, width
        options = {"is_exact": weight.dtype == torch.float32, "block": block_of(width)}
        self._run("norm", (len(x), num_parts), out, x, weight, *sizes, **options)

    def norm_gated(
        self, x_THV: Tensor, weight_V: Tensor, eps: float, z_THV: Tensor, out_THV: Tensor
    ) -> None:
        num_rows, num_parts, width = out_THV.shape
        tensors = out_THV, x_THV, weight_V, z_THV
        options = {"block": block_of(width)}
        self._run(
            "norm_gated", (num_rows, num_parts), *tensors, z_THV.stride(0), eps, width, **options
        )

    def rotate(self, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
        num_rows, num_heads, _ = x_THC.shape
        strides, width = x_THC.stride()[:2], cos_TR.shape[1]
        options = {"block": block_of(width)}
        self._run(
            "rotate", (num_rows, num_heads), x_THC, cos_TR, sin_TR, *strides, width, **options
        )

    def _run(self, name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if all(grid) and options["block"]:
            launch(name, grid, *arguments, **options)


def launch(name: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """One launch of the kernel of that name, on the stream that is current. Products and sums are
    rounded one by one, as torch's are."""
    # With a GPU only: Triton is no part of a torch without CUDA.
    from moebatch.model.gpu import kernels

    getattr(kernels, name)[grid](*arguments, enable_fp_fusion=False, **options)


def clamping(clamped: ClampedGate | None) -> dict[str, Any]:
    """What a kernel has to know of a gate."""
    if clamped is None:
        return dict.fromkeys(_CLAMPING, 0.0) | {"is_clamped": False}
    return {name: getattr(clamped, name) for name in _CLAMPING} | {"is_clamped": True}


def block_of(width: int) -> int:
    """The power of two that holds so many numbers."""
    return 1 << (width - 1).bit_length() if width else 0
