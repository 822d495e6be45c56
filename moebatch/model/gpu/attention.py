"""Tokens of sequences that decode attend to the pages of their cache in place: one launch for all
of a micro-batch.

Shape letters: T tokens of the micro-batch, H query heads, G KV heads, C head size, V that of
values, R rows of the cache.
"""

import torch
from torch import Tensor

from moebatch.model.gpu.rows import block_of, launch
from moebatch.model.native.attention_work import Cached, SingleQueries, has_whole_rows
from moebatch.model.native.scoring import Scoring

_POSITIONS = 64
"""That are looked at together."""
_LEAST_HEADS = 16
"""Rows of a product of tensor cores."""


def attend_single(
    seen: SingleQueries, q_THC: Tensor, cached: Cached, out_THV: Tensor, scoring: Scoring
) -> None:
    """Writes the rows of `out_THV` of single tokens that see something of the cache, by keys and
    values as they are computed in. Rows of all tensors may lie any distance apart, with their heads
    side by side."""
    keys_RGC, values_RGV, codes = cached
    assert codes is None and scoring.sinks is None, "others are left to torch"
    assert all(map(has_whole_rows, (q_THC, keys_RGC, values_RGV, out_THV)))
    assert q_THC.dtype == keys_RGC.dtype == values_RGV.dtype == out_THV.dtype
    (num_kv_heads, head_dim), value_dim = keys_RGC.shape[1:], out_THV.shape[2]
    num_shared = q_THC.shape[1] // num_kv_heads
    sink_scores_H = scoring.sink_scores_H
    has_scores = sink_scores_H is not None
    launch(
        "attend_single",
        (len(seen.tokens_B), num_kv_heads),
        *(out_THV, q_THC, keys_RGC, values_RGV, *seen),
        seen.tokens_B if sink_scores_H is None else sink_scores_H,
        *(each.stride(0) for each in (q_THC, out_THV, keys_RGC, values_RGV)),
        num_shared,
        head_dim,
        value_dim,
        scoring.scale,
        has_sink_scores=has_scores,
        precision="ieee",
        H=max(_LEAST_HEADS, block_of(num_shared)),
        S=_POSITIONS // (2 if q_THC.dtype == torch.float32 else 1),
        C=max(_LEAST_HEADS, block_of(head_dim)),
        V=max(_LEAST_HEADS, block_of(value_dim)),
    )
