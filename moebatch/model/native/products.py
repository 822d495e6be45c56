"""What the compiled products are given: tensors, as addresses.

Shape letters: N rows, O outputs, I inputs.
"""

import ctypes
import functools
from pathlib import Path

from torch import Tensor

from moebatch.formats.coded import CodedMatrix
from moebatch.model.native.codes import Coding, coding
from moebatch.model.native.instruction_set import is_intel
from moebatch.model.native.kernels import DTYPES

_CODED = 5
"""In the place of a type of numbers."""
_USUAL_CACHE_BYTES = 2**19
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class ProductWork(ctypes.Structure):
    """``struct product_work`` of the C file."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("x_row", ctypes.c_int64),
        ("out_row", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("cache_bytes", ctypes.c_int64),
        ("next_item", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("has_failed", ctypes.c_int32),
        ("widens_beside", ctypes.c_int32),
        ("coding", Coding),
    )


def multipliable(
    x_NI: Tensor, weight_OI: Tensor | CodedMatrix, bias_O: Tensor | None, out_NO: Tensor
) -> bool:
    """Whether these are numbers that the kernel knows, in rows without gaps, in main memory; coded
    weights are asked `is_compiled` beside."""
    return (
        x_NI.dtype == out_NO.dtype
        and (bias_O is None or (bias_O.dtype == x_NI.dtype and _has_rows(bias_O)))
        and (isinstance(weight_OI, CodedMatrix) or _lies_whole(weight_OI))
        and _has_rows(x_NI)
        and _has_rows(out_NO)
    )


def _has_rows(tensor: Tensor) -> bool:
    is_known = tensor.is_cpu and tensor.dtype in DTYPES
    return is_known and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)


def _lies_whole(weight_OI: Tensor) -> bool:
    return weight_OI.is_cpu and weight_OI.dtype in DTYPES and weight_OI.is_contiguous()


def product_work(
    x_NI: Tensor,
    weight_OI: Tensor | CodedMatrix,
    bias_O: Tensor | None,
    out_NO: Tensor,
    *,
    num_threads: int,
) -> ProductWork:
    """A product of what is `multipliable`. Only pointers: tensors must live until it is done."""
    (num_rows, num_inputs), num_outputs = x_NI.shape, weight_OI.shape[0]
    assert weight_OI.shape[1] == num_inputs and out_NO.shape == (num_rows, num_outputs)
    work = ProductWork(
        x=x_NI.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        out=out_NO.data_ptr(),
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        x_row=x_NI.stride(0),
        out_row=out_NO.stride(0),
        num_threads=num_threads,
        cache_bytes=_cache_bytes(),
        dtype=DTYPES[x_NI.dtype],
        weight_dtype=_CODED,
        widens_beside=not is_intel(),
    )
    if isinstance(weight_OI, CodedMatrix):
        work.coding = coding(weight_OI)
    else:
        work.weights, work.weight_dtype = weight_OI.data_ptr(), DTYPES[weight_OI.dtype]
    return work


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
