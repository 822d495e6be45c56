"""What the compiled attention is given: tensors, as addresses.

Shape letters: T tokens of the micro-batch, B queries or slices of them, N rows that they see,
H query heads, G KV heads, C head size, V that of values, R rows of the cache.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.native.kernels import CACHE_DTYPES, DTYPES, address_of, fields
from moebatch.model.native.scoring import Scoring
from moebatch.spec.model.cache_layout import CacheDtype

_QUERIES_PER_THREAD = 8
"""With fewer single queries than that, KV heads are divided among the threads as well."""
_ITEMS_PER_THREAD = 4
"""With fewer pieces of slices than that, they become smaller if they can."""
_MOST_ROWS = 512
_LEAST_ROWS = 64
"""Rows of a piece of slices; a row is a query at one head. Every piece copies the keys and values
that it sees; its scratch is 0.3 MB per thread at a head size of 64, 0.8 MB at 128 in float32."""
_UNLIMITED = 2**62


class SingleQueries(NamedTuple):
    """Tokens that each see some rows of the cache. All int64, where attention is computed."""

    tokens_B: Tensor
    """Row of each in the micro-batch."""
    starts_B: Tensor
    """Where its rows begin in `rows_N`; one more for the end."""
    rows_N: Tensor
    """Cache rows of all of them, one after the other."""


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
    window: int | None = None
    """Last positions that a token sees, itself included; None is all of its slice's."""


class Cached(NamedTuple):
    """Keys and values of a layer as they are cached. Values may be the first numbers of the keys,
    at one KV head."""

    keys_RGC: Tensor
    values_RGV: Tensor
    codes: CacheDtype | None = None
    """They are codes and scales, as `encode` makes them; None is the numbers themselves."""

    @property
    def number(self) -> int:
        """That of the C files for what is cached."""
        return DTYPES[self.keys_RGC.dtype] if self.codes is None else CACHE_DTYPES[self.codes]

    @property
    def row_bytes(self) -> int:
        """Bytes of a position, all heads together; values that are part of their keys are none."""
        return self.keys_RGC[0].nbytes + (0 if self.is_shared else self.values_RGV[0].nbytes)

    @property
    def is_shared(self) -> bool:
        """Whether values are part of their keys."""
        return self.values_RGV.data_ptr() == self.keys_RGC.data_ptr()


class AttentionWork(ctypes.Structure):
    """As in ``attention_work.h``, which says what each field is."""

    _fields_ = (
        *fields(
            ctypes.c_void_p,
            "queries sink_queries out keys values tokens counts starts rows sink_scores",
        ),
        *fields(
            ctypes.c_int64,
            "num_slices num_heads num_kv_heads num_sinks head_dim value_dim value_head "
            "query_row sink_query_row out_row key_row value_row window kv_heads_per_item "
            "rows_per_item next_item",
        ),
        *fields(ctypes.c_int32, "dtype cache_dtype"),
        ("scale", ctypes.c_float),
        ("has_failed", ctypes.c_int32),
    )


def work_of(
    seen: SingleQueries | QuerySlices,
    q_THC: Tensor,
    cached: Cached,
    out_THV: Tensor,
    scoring: Scoring,
    *,
    num_threads: int,
) -> AttentionWork:
    """What is to be computed, by `Kernels.attend` of single queries, by `attend_slices` of slices.
    Only pointers: the tensors must live until it has been.

    Sinks are the first rows of what a query or a slice sees. Tokens, and cache rows, may lie any
    distance apart, with their heads side by side.
    """
    num_sinks, sinks_THC = scoring.sinks or (0, q_THC)
    keys_RGC, values_RGV, _ = cached
    tensors = (q_THC, sinks_THC, keys_RGC, values_RGV, out_THV)
    assert all(has_whole_rows(tensor) and tensor.device.type == "cpu" for tensor in tensors)
    assert q_THC.dtype == out_THV.dtype and keys_RGC.dtype == values_RGV.dtype
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THC.shape, keys_RGC.shape[1]
    counts_B, window = None, None
    if isinstance(seen, QuerySlices):
        counts_B, window = seen.counts_B, seen.window
    value_dim = out_THV.shape[2]
    assert not cached.is_shared or num_kv_heads == 1 or value_dim == head_dim
    has_few = len(seen.tokens_B) < _QUERIES_PER_THREAD * num_threads
    return AttentionWork(
        queries=q_THC.data_ptr(),
        sink_queries=sinks_THC.data_ptr(),
        out=out_THV.data_ptr(),
        keys=keys_RGC.data_ptr(),
        values=values_RGV.data_ptr(),
        tokens=seen.tokens_B.data_ptr(),
        counts=address_of(counts_B),
        starts=seen.starts_B.data_ptr(),
        rows=seen.rows_N.data_ptr(),
        sink_scores=_sinks_of(scoring.sink_scores_H, num_heads),
        num_slices=len(seen.tokens_B),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_sinks=num_sinks,
        head_dim=head_dim,
        value_dim=value_dim,
        value_head=head_dim if cached.is_shared else value_dim,
        query_row=q_THC.stride(0),
        sink_query_row=sinks_THC.stride(0),
        out_row=out_THV.stride(0),
        key_row=keys_RGC.stride(0),
        value_row=values_RGV.stride(0),
        window=_UNLIMITED if window is None else window,
        kv_heads_per_item=1 if has_few else num_kv_heads,
        rows_per_item=_rows_per_item(num_tokens * num_heads, num_threads),
        dtype=DTYPES[q_THC.dtype],
        cache_dtype=cached.number,
        scale=scoring.scale,
    )


def has_whole_rows(tensor_THC: Tensor) -> bool:
    """Whether the numbers of a token follow each other."""
    num_heads, head_dim = tensor_THC.shape[1:]
    return tensor_THC.stride(2) == 1 and (num_heads == 1 or tensor_THC.stride(1) == head_dim)


def _sinks_of(sink_scores_H: Tensor | None, num_heads: int) -> int | None:
    if sink_scores_H is None:
        return None
    assert sink_scores_H.dtype == torch.float32 and sink_scores_H.shape == (num_heads,)
    assert sink_scores_H.is_contiguous() and sink_scores_H.device.type == "cpu"
    return sink_scores_H.data_ptr()


def _rows_per_item(num_rows: int, num_threads: int) -> int:
    rows = _MOST_ROWS
    while rows > _LEAST_ROWS and num_rows < _ITEMS_PER_THREAD * num_threads * rows:
        rows //= 2
    return rows
