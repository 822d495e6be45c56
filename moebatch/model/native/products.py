"""What the compiled products are given: tensors, as addresses.

Shape letters: N rows, O outputs, I inputs.
"""

import ctypes
import functools
import math
from pathlib import Path

from torch import Tensor

from moebatch.formats.coded import CodedMatrix
from moebatch.model.native.codes import Coding, coding
from moebatch.model.native.instruction_set import is_intel
from moebatch.model.native.kernels import DTYPES, address_of, fields
from moebatch.model.native.rows import Clamping

_CODED = 5
"""In the place of a type of numbers."""
_USUAL_CACHE_BYTES = 2**19
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class MatrixWork(ctypes.Structure):
    """``struct matrix`` of the C file."""

    _fields_ = (
        *fields(ctypes.c_void_p, "weights bias"),
        ("coding", Coding),
    )


class ProductWork(ctypes.Structure):
    """``struct product_work`` of the C file."""

    _fields_ = (
        *fields(ctypes.c_void_p, "x x_rows out out_rows choices choice_weights"),
        *fields(
            ctypes.c_int64,
            "num_choices num_rows num_outputs num_inputs x_row out_row out_part out_part_row "
            "num_threads cache_bytes num_products after next_item num_done",
        ),
        *fields(ctypes.c_int32, "dtype weight_dtype has_failed widens_beside puts"),
        ("clamping", Clamping),
        *fields(MatrixWork, "matrix up"),
    )


def multipliable(
    x_NI: Tensor, weight_OI: Tensor | CodedMatrix, bias_O: Tensor | None, out_NO: Tensor
) -> bool:
    """Whether these are numbers that the kernel knows, in rows without gaps, in main memory; coded
    weights are asked `is_compiled` beside."""
    return (
        x_NI.dtype == out_NO.dtype
        and (bias_O is None or (bias_O.dtype == x_NI.dtype and _has_rows(bias_O)))
        and (isinstance(weight_OI, CodedMatrix) or lies_whole(weight_OI))
        and _has_rows(x_NI)
        and _has_rows(out_NO)
    )


def _has_rows(tensor: Tensor) -> bool:
    is_known = tensor.is_cpu and tensor.dtype in DTYPES
    return is_known and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)


def lies_whole(weight_OI: Tensor) -> bool:
    """Whether these are numbers that the kernel knows, without gaps, in main memory."""
    return weight_OI.is_cpu and weight_OI.dtype in DTYPES and weight_OI.is_contiguous()


def product_work(
    x_NI: Tensor,
    weight_OI: Tensor | CodedMatrix,
    bias_O: Tensor | None,
    out_NO: Tensor,
    *,
    num_threads: int,
) -> ProductWork:
    """A product of what is `multipliable`. Only pointers: tensors must live until it is done. The
    outputs may lie in parts, [N, parts, outputs of one]."""
    (num_rows, num_inputs), num_outputs = x_NI.shape, weight_OI.shape[0]
    assert weight_OI.shape[1] == num_inputs and out_NO.shape[0] == num_rows
    assert math.prod(out_NO.shape[1:]) == num_outputs, "as many outputs as weights have"
    work = work_between(x_NI, weight_OI, out_NO, num_threads=num_threads)
    if out_NO.dim() == 3:
        work.out_row, work.out_part_row, _ = out_NO.stride()
        work.out_part = out_NO.shape[2]
    work.num_rows = num_rows
    work.matrix = matrix_work(weight_OI)
    work.matrix.bias = address_of(bias_O)
    return work


def work_between(
    x: Tensor, weight_OI: Tensor | CodedMatrix, out: Tensor, *, num_threads: int
) -> ProductWork:
    """A product of rows of `x` into rows of `out`, which have any number of them, by weights that
    are like these: how many rows, and which weights, is still to be said."""
    (num_outputs, num_inputs), dtype = weight_OI.shape, _CODED
    if not isinstance(weight_OI, CodedMatrix):
        dtype = DTYPES[weight_OI.dtype]
    return ProductWork(
        x=x.data_ptr(),
        out=out.data_ptr(),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        x_row=x.stride(-2),
        out_row=out.stride(-2),
        out_part=num_outputs,
        num_threads=num_threads,
        cache_bytes=_cache_bytes(),
        num_products=1,
        dtype=DTYPES[x.dtype],
        weight_dtype=dtype,
        widens_beside=not is_intel(),
    )


def matrix_work(weight_OI: Tensor | CodedMatrix) -> MatrixWork:
    """The part of a work that is its weights, of the type of the work, without a bias."""
    if isinstance(weight_OI, CodedMatrix):
        return MatrixWork(coding=coding(weight_OI))
    return MatrixWork(weights=weight_OI.data_ptr())


@functools.cache
def _cache_bytes(caches: Path = _CACHES) -> int:
    """Second-level cache of a core, as Linux describes it; a usual one elsewhere. Python's sysconf
    has no name for it."""
    for level in caches.glob("index*/level"):
        try:
            if int(level.read_text()) == 2:
                return int(level.with_name("size").read_text().strip().removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return _USUAL_CACHE_BYTES
