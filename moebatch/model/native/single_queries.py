"""What the compiled attention is given: tensors, as addresses.

Shape letters: T tokens of the micro-batch, B queries, N rows that they see, H query heads,
G KV heads, C head size, V that of values, R rows of the cache.
"""

import ctypes
from typing import NamedTuple

from torch import Tensor

from moebatch.model.native.kernels import DTYPES, number_of
from moebatch.model.native.sink_queries import SinkQueries, address_of
from moebatch.spec.cache_layout import CacheDtype

_ITEMS_PER_THREAD = 8
"""With fewer queries than that, KV heads are divided among the threads as well."""


class SingleQueries(NamedTuple):
    """Tokens that each see some rows of the cache. All int64, on the CPU."""

    tokens_B: Tensor
    """Row of each in the micro-batch."""
    starts_B: Tensor
    """Where its rows begin in `rows_N`; one more for the end."""
    rows_N: Tensor
    """Cache rows of all of them, one after the other."""


class Work(ctypes.Structure):
    """``struct work`` of the C file."""

    _fields_ = (
        ("queries", ctypes.c_void_p),
        ("sink_queries", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("sink_scores", ctypes.c_void_p),
        ("num_queries", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("num_sinks", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("kv_heads_per_item", ctypes.c_int64),
        ("next_item", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("has_failed", ctypes.c_int32),
    )


def work_of(
    queries: SingleQueries,
    q_THC: Tensor,
    keys_RGC: Tensor,
    values_RGV: Tensor,
    out_THV: Tensor,
    *,
    num_threads: int,
    scale: float | None = None,
    cached_in: CacheDtype | None = None,
    sinks: SinkQueries | None = None,
    sink_scores_H: Tensor | None = None,
) -> Work:
    """What is to be computed. Only pointers: the tensors must live until it has been.

    Keys and values `cached_in` 8 bits are codes and scales, as `encode` makes them. Of what a query
    sees the first rows are `sinks`. `sink_scores_H`, in float32, are as in `attend`.
    Values may be the first numbers of the keys, at one KV head. `scale` is by what scores are
    multiplied, None is as usual.
    """
    num_sinks, sinks_THC = sinks or (0, q_THC)
    tensors = (q_THC, sinks_THC, out_THV, keys_RGC, *queries)
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
    assert q_THC.dtype == out_THV.dtype and keys_RGC.dtype == values_RGV.dtype
    assert keys_RGC.stride() == values_RGV.stride(), "they are where their keys are"
    (_, num_heads, head_dim), num_kv_heads = q_THC.shape, keys_RGC.shape[1]
    value_dim = out_THV.shape[2]
    assert value_dim == head_dim or num_kv_heads == 1
    num_queries = len(queries.tokens_B)
    few = num_queries < _ITEMS_PER_THREAD * num_threads
    return Work(
        queries=q_THC.data_ptr(),
        sink_queries=sinks_THC.data_ptr(),
        out=out_THV.data_ptr(),
        keys=keys_RGC.data_ptr(),
        values=values_RGV.data_ptr(),
        tokens=queries.tokens_B.data_ptr(),
        starts=queries.starts_B.data_ptr(),
        rows=queries.rows_N.data_ptr(),
        sink_scores=address_of(sink_scores_H, num_heads),
        num_queries=num_queries,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_sinks=num_sinks,
        head_dim=head_dim,
        value_dim=value_dim,
        kv_heads_per_item=1 if few else num_kv_heads,
        next_item=0,
        dtype=DTYPES[q_THC.dtype],
        cache_dtype=number_of(keys_RGC.dtype, cached_in),
        scale=head_dim**-0.5 if scale is None else scale,
    )
