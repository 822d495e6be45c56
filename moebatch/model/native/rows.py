"""What the compiled functions are given that go through rows of numbers: tensors, as addresses."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from moebatch.model.native.kernels import DTYPES

_ROW_DTYPES = (torch.float32, torch.bfloat16)


class RowWork(ctypes.Structure):
    """``struct row_work`` of the C file."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("choices", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("part_stride", ctypes.c_int64),
        ("next_row", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("is_exact", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


def suits(*tensors: Tensor | None) -> bool:
    """Whether rows of these can be gone through together: in memory without gaps, of one type."""
    dtype = None
    for tensor in tensors:
        if tensor is None:
            continue
        if dtype is None:
            dtype = tensor.dtype
        if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
            return False
    return dtype in _ROW_DTYPES


def row_work(
    out: Tensor,
    first: Tensor,
    second: Tensor | None = None,
    *,
    num_rows: int,
    num_parts: int = 1,
    width: int,
    stride: int = 0,
    **others: Any,
) -> RowWork:
    """Work on tensors that suit. Only pointers: the tensors must live until it has been done."""
    return RowWork(
        out=out.data_ptr(),
        first=first.data_ptr(),
        second=None if second is None else second.data_ptr(),
        num_rows=num_rows,
        num_parts=num_parts,
        width=width,
        stride=stride,
        dtype=DTYPES[out.dtype],
        **others,
    )
