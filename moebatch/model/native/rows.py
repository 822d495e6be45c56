"""The compiled functions that go through rows of numbers, and what they are given: tensors, as
addresses."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from moebatch.model.native.kernels import DTYPES, Kernel, Kernels, address_of, fields, threads_for
from moebatch.model.routing.tokens import ExpertTokens
from moebatch.spec.model.blocks import ClampedGate

ROW_DTYPES = (torch.float32, torch.bfloat16)
"""What goes through rows knows."""
_LEAST_SHARED_BYTES = 2**17
"""What one thread has written before another one would be awake."""


class Clamping(ctypes.Structure):
    """``struct clamping`` of the C file: a `ClampedGate`."""

    _fields_ = (*fields(ctypes.c_float, "most_gate most_activated limit alpha added"),)


class RowWork(ctypes.Structure):
    """``struct row_work`` of the C file."""

    _fields_ = (
        *fields(ctypes.c_void_p, "out first second third rows choices weights"),
        *fields(ctypes.c_int64, "num_rows num_parts width stride part_stride next_row"),
        *fields(ctypes.c_int32, "dtype is_exact"),
        *fields(ctypes.c_float, "eps scale"),
        ("clamping", Clamping),
    )


def clamping_of(clamped: ClampedGate) -> Clamping:
    """The same for the kernels."""
    return Clamping(*(getattr(clamped, name) for name, *_ in Clamping._fields_))


def row_work(out: Tensor, first: Tensor, second: Tensor | None = None, **others: Any) -> RowWork:
    """Work on tensors that suit, as many rows of as many parts as `out` has, each as wide, but for
    what `others` say. Only pointers: the tensors must live until it has been done."""
    num_rows, *parts, width = out.shape
    sizes = {"num_rows": num_rows, "num_parts": math.prod(parts), "width": width}
    return RowWork(
        out=out.data_ptr(),
        first=first.data_ptr(),
        second=address_of(second),
        dtype=DTYPES[out.dtype],
        **(sizes | others),
    )


class NativeRows:
    """`RowKernels` on a CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    @staticmethod
    def suits(*tensors: Tensor | None) -> bool:
        dtype = None
        for tensor in tensors:
            if tensor is None:
                continue
            if dtype is None:
                dtype = tensor.dtype
            if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
                return False
        return dtype in ROW_DTYPES

    def gate(self, gate_MF: Tensor, up_MF: Tensor, clamped: ClampedGate | None) -> None:
        kernel, work = self._kernels.gate, row_work(gate_MF, up_MF)
        if clamped is not None:
            kernel, work.clamping = self._kernels.gate_clamped, clamping_of(clamped)
        self._run(kernel, work, gate_MF)

    def place(
        self, y_MD: Tensor, tokens: ExpertTokens, outputs_TKD: Tensor, weights_TK: Tensor
    ) -> None:
        rows_M, choices_M = (each.contiguous() for each in tokens)
        work = row_work(
            outputs_TKD,
            y_MD,
            num_rows=y_MD.shape[0],
            rows=rows_M.data_ptr(),
            choices=choices_M.data_ptr(),
            weights=weights_TK.data_ptr(),
        )
        self._run(self._kernels.place, work, y_MD)

    def add(self, x_MD: Tensor, scale: float, first: Tensor, second: Tensor | None) -> None:
        num_parts = first.shape[1] if first.dim() == 3 else 1
        work = row_work(x_MD, first, second, num_parts=num_parts, scale=scale)
        self._run(self._kernels.add, work, x_MD)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        is_exact = weight.dtype == torch.float32
        work = row_work(out, x, weight, stride=x.stride(0), eps=eps, is_exact=is_exact)
        self._run(self._kernels.norm, work, out)

    def norm_gated(
        self, x_THV: Tensor, weight_V: Tensor, eps: float, z_THV: Tensor, out_THV: Tensor
    ) -> None:
        gates = {"third": z_THV.data_ptr(), "stride": z_THV.stride(0)}
        work = row_work(out_THV, x_THV, weight_V, eps=eps, **gates)
        self._run(self._kernels.norm_gated, work, out_THV)

    def rotate(self, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
        stride, part_stride, _ = x_THC.stride()
        sizes = {"width": cos_TR.shape[1], "stride": stride, "part_stride": part_stride}
        work = row_work(x_THC, cos_TR, sin_TR, **sizes)
        self._run(self._kernels.rotate, work, x_THC)

    def _run(self, kernel: Kernel, work: RowWork, written: Tensor) -> None:
        if written.numel():
            num_threads = threads_for(written.nbytes, _LEAST_SHARED_BYTES)
            kernel(work, num_threads)
