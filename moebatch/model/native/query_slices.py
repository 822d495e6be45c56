"""What the compiled attention of slices is given: tensors, as addresses.

Shape letters: T tokens of the micro-batch, B slices, N rows that they see, H query heads,
G KV heads, C head size, V that of values, R rows of the cache.
"""

import ctypes
from typing import NamedTuple

from torch import Tensor

from moebatch.model.native.kernels import DTYPES, number_of
from moebatch.model.native.sink_queries import SinkQueries, address_of
from moebatch.spec.cache_layout import CacheDtype

_ITEMS_PER_THREAD = 4
"""With fewer pieces of work than that, they become smaller if they can."""
_MOST_ROWS = 512
_LEAST_ROWS = 64
"""Rows of a piece of work; a row is a query at one head. Every piece copies the keys and values
that it sees; its scratch is 0.3 MB per thread at a head size of 64, 0.8 MB at 128 in float32."""
_UNLIMITED = 2**62


class QuerySlices(NamedTuple):
    """Slices of several new tokens of a sequence each. Tensors are int64, on the CPU."""

    tokens_B: Tensor
    """Row of the first token of each in the micro-batch."""
    counts_B: Tensor
    """Tokens of each."""
    starts_B: Tensor
    """Where its rows begin in `rows_N`; one more for the end."""
    rows_N: Tensor
    """Cache rows that its tokens see, first position first; the last ones are those of the tokens
    themselves. Slices follow one another."""
    num_pairs: int
    """Pairs of a token and a position of its slice."""


class SliceWork(ctypes.Structure):
    """``struct slice_work`` of the C file."""

    _fields_ = (
        ("queries", ctypes.c_void_p),
        ("sink_queries", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("sink_scores", ctypes.c_void_p),
        ("num_slices", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("num_sinks", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("query_row", ctypes.c_int64),
        ("sink_query_row", ctypes.c_int64),
        ("out_row", ctypes.c_int64),
        ("key_row", ctypes.c_int64),
        ("value_row", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("rows_per_item", ctypes.c_int64),
        ("next_item", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("has_failed", ctypes.c_int32),
    )


def slice_work_of(
    slices: QuerySlices,
    q_THC: Tensor,
    keys_RGC: Tensor,
    values_RGV: Tensor,
    out_THV: Tensor,
    *,
    window: int | None,
    num_threads: int,
    scale: float | None = None,
    cached_in: CacheDtype | None = None,
    sinks: SinkQueries | None = None,
    sink_scores_H: Tensor | None = None,
) -> SliceWork:
    """What is to be computed. Only pointers: the tensors must live until it has been.

    Keys and values `cached_in` 8 bits are codes and scales, as `encode` makes them. Of what a slice
    sees the first rows are `sinks`. `sink_scores_H`, in float32, are as in `attend`.

    `scale` is by what scores are multiplied, None is as usual. Tokens, and cache rows, may lie any
    distance apart, with their heads side by side; where there is one KV head, values may be the
    first numbers of their keys.
    """
    num_sinks, sinks_THC = sinks or (0, q_THC)
    tensors = (q_THC, sinks_THC, keys_RGC, values_RGV, out_THV)
    assert all(has_whole_rows(tensor) and tensor.device.type == "cpu" for tensor in tensors)
    assert q_THC.dtype == out_THV.dtype and keys_RGC.dtype == values_RGV.dtype
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THC.shape, keys_RGC.shape[1]
    return SliceWork(
        queries=q_THC.data_ptr(),
        sink_queries=sinks_THC.data_ptr(),
        out=out_THV.data_ptr(),
        keys=keys_RGC.data_ptr(),
        values=values_RGV.data_ptr(),
        tokens=slices.tokens_B.data_ptr(),
        counts=slices.counts_B.data_ptr(),
        starts=slices.starts_B.data_ptr(),
        rows=slices.rows_N.data_ptr(),
        sink_scores=address_of(sink_scores_H, num_heads),
        num_slices=len(slices.tokens_B),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_sinks=num_sinks,
        head_dim=head_dim,
        value_dim=out_THV.shape[2],
        query_row=q_THC.stride(0),
        sink_query_row=sinks_THC.stride(0),
        out_row=out_THV.stride(0),
        key_row=keys_RGC.stride(0),
        value_row=values_RGV.stride(0),
        window=_UNLIMITED if window is None else window,
        rows_per_item=_rows_per_item(num_tokens * num_heads, num_threads),
        next_item=0,
        dtype=DTYPES[q_THC.dtype],
        cache_dtype=number_of(keys_RGC.dtype, cached_in),
        scale=head_dim**-0.5 if scale is None else scale,
    )


def has_whole_rows(tensor_THC: Tensor) -> bool:
    """Whether the numbers of a token follow each other."""
    num_heads, head_dim = tensor_THC.shape[1:]
    return tensor_THC.stride(2) == 1 and (num_heads == 1 or tensor_THC.stride(1) == head_dim)


def _rows_per_item(num_rows: int, num_threads: int) -> int:
    rows = _MOST_ROWS
    while rows > _LEAST_ROWS and num_rows < _ITEMS_PER_THREAD * num_threads * rows:
        rows //= 2
    return rows
