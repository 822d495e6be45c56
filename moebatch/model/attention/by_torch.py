"""Attention over a KV cache of flat rows, without padding between sequences.

Shape letters: T tokens of the micro-batch, B decoding sequences, S positions, H query heads,
G KV heads, C head size, V that of values, R rows of the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model.attention.cached_numbers import decode, encode
from moebatch.model.attention.plan import QUERY_BLOCK, AttentionPlan, DecodeGroup, PromptSlice
from moebatch.model.native.attention_work import Cached
from moebatch.model.native.scoring import Scoring
from moebatch.spec.model.cache_layout import CacheDtype

_SCORED_BLOCK = 64
"""Queries that are attended at a time where their scores lie in memory: no product of torch meets
keys with two queries, or knows scores without a key."""
_MASK_STEP = 16
"""Rows of a mask begin at multiples of so many numbers."""


Parts = tuple[Tensor, ...]
"""Keys and values of tokens, as the parts of a `CacheLayout`: [R, heads, head size] each."""


def keys_and_values(parts: Parts, value_dim: int) -> tuple[Tensor, Tensor]:
    """Views, [R, G, C] and [R, G, V]. Values without a part of their own are the first numbers of
    their keys."""
    keys_RGC, *others = parts
    return keys_RGC, others[0] if others else keys_RGC[..., :value_dim]


class Qkv(NamedTuple):
    """What tokens of a micro-batch bring: rotated queries, and what the cache is to hold."""

    q_THC: Tensor
    parts: Parts

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_THC, *self.parts)

    def first(self, num_tokens: int) -> "Qkv":
        """Views of the first rows."""
        return self.of(slice(num_tokens))

    def of(self, tokens: slice) -> "Qkv":
        """Views of some rows."""
        return Qkv(self.q_THC[tokens], tuple(part[tokens] for part in self.parts))

    def copy_into(self, room: "Qkv") -> "Qkv":
        """Copies them to the first rows of `room`, and returns views of these."""
        filled = room.first(len(self.q_THC))
        for source, target in zip(self.tensors, filled.tensors, strict=True):
            target.copy_(source)
        return filled


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKv:
    """Keys and values of one layer, and room into which rows of them are gathered."""

    parts: Parts
    rooms: Parts
    """Of as many rows as are ever gathered, in the compute dtype."""
    value_dim: int
    """Size of a head of values that have no part of their own."""
    cached_in: CacheDtype | None = None
    """Keys and values are codes and scales; None is the numbers themselves."""

    @property
    def cached(self) -> Cached:
        """Keys and values as they are cached."""
        return Cached(*keys_and_values(self.parts, self.value_dim), self.cached_in)

    def of_heads(self, heads: slice) -> "LayerKv":
        """Views of some heads of keys and values."""
        parts, rooms = (tuple(x[:, heads] for x in each) for each in (self.parts, self.rooms))
        return replace(self, parts=parts, rooms=rooms)

    def write(self, rows_T: Tensor, new: Parts) -> None:
        """Stores what there is of new tokens."""
        for part_RGC, new_TGC in zip(self.parts, new, strict=True):
            part_RGC.index_copy_(0, rows_T, self._stored(new_TGC, part_RGC.dtype))

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values of these rows in the compute dtype; valid until the next read."""
        pairs = zip(self.parts, self.rooms, strict=True)
        read = tuple(self._rows_of(part_RGC, rows, room_SGC) for part_RGC, room_SGC in pairs)
        return keys_and_values(read, self.value_dim)

    def gather(self, rows_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The same of some rows for each of several queries, [B, G, S, C] and [B, G, S, V]."""
        keys, values = self.read(rows_BS.view(-1))
        return (
            keys.view(*rows_BS.shape, *keys.shape[1:]).transpose(1, 2),
            values.view(*rows_BS.shape, *values.shape[1:]).transpose(1, 2),
        )

    def _stored(self, x_TGC: Tensor, dtype: torch.dtype) -> Tensor:
        return x_TGC.to(dtype) if self.cached_in is None else encode(x_TGC, self.cached_in)

    def _rows_of(self, cache_RGC: Tensor, rows: Tensor | slice, room_SGC: Tensor) -> Tensor:
        if isinstance(rows, slice):
            part = cache_RGC[rows]
        elif self.cached_in is None and cache_RGC.dtype == room_SGC.dtype:
            return torch.index_select(cache_RGC, 0, rows, out=room_SGC[: len(rows)])
        else:
            part = cache_RGC.index_select(0, rows)
        if self.cached_in is not None:
            return decode(part, self.cached_in, room_SGC[: len(part)])
        return part if part.dtype == room_SGC.dtype else room_SGC[: len(part)].copy_(part)


def attend(qkv: Qkv, plan: AttentionPlan, kv: LayerKv, out_THV: Tensor, scoring: Scoring) -> None:
    """Attention of tokens to what `plan` lets them see, those left out that it leaves to compiled
    kernels; writes their rows of `out_THV`.

    The new keys and values must be in the cache already. `scoring` has sinks if the plan has such.
    """
    for group in plan.decodes:
        _attend_decodes(qkv.q_THC, group, kv, out_THV, scoring)
    for prompt in plan.prompts:
        new = qkv.of(prompt.tokens)
        if not prompt.context and kv.cached_in is None:
            seen = keys_and_values(new.parts, kv.value_dim)
        else:
            seen = kv.read(prompt.rows)
        attend_prompt(
            new.q_THC, seen, prompt, plan, out_THV[prompt.tokens], scoring.of(prompt.tokens)
        )


def _attend_decodes(
    q_THC: Tensor, group: DecodeGroup, kv: LayerKv, out_THV: Tensor, scoring: Scoring
) -> None:
    """One query per sequence. Query heads that share a KV head are rows of one product."""
    tokens_B, mask_B11S = group.seen.tokens_B, group.mask_B11S
    k_BGSC, v_BGSV = kv.gather(group.seen.rows_BS)
    num_seqs, num_kv_heads, _, head_dim = k_BGSC.shape

    def arranged(x_THC: Tensor) -> Tensor:
        return x_THC.index_select(0, tokens_B).view(num_seqs, num_kv_heads, -1, head_dim)

    if scoring.is_usual:
        out = F.scaled_dot_product_attention(
            arranged(q_THC), k_BGSC, v_BGSV, attn_mask=mask_B11S, scale=scoring.scale
        )
    else:
        heads = (num_kv_heads, -1, 1)
        weights = _weights(scoring, arranged, q_THC, k_BGSC, mask_B11S, heads)
        out = weights.to(v_BGSV.dtype) @ v_BGSV
    out_THV.index_copy_(0, tokens_B, out.reshape(num_seqs, *out_THV.shape[1:]))


def attend_prompt(
    q_THC: Tensor,
    seen: tuple[Tensor, Tensor],
    prompt: PromptSlice,
    plan: AttentionPlan,
    out_THV: Tensor,
    scoring: Scoring,
) -> None:
    """Queries of one sequence, in blocks where causal attention alone does not do. Keys and values
    that are `seen`, [S, G, C] and [S, G, V], are those of the prompt's rows."""
    (k_SGC, v_SGV), (window, num_sinks) = seen, plan.sight
    is_whole = prompt.context == 0 and (window is None or prompt.num_tokens <= window)
    if is_whole and scoring.is_usual:
        _attend_block(q_THC, k_SGC, v_SGV, None, out_THV, scoring.scale)
        return
    block = QUERY_BLOCK if scoring.is_usual else _SCORED_BLOCK
    for first in range(0, prompt.num_tokens, block):
        stop = min(first + block, prompt.num_tokens)
        num_keys = max(0, prompt.context + stop - prompt.first_key)
        first_key = 0
        if window is not None:
            seen_from = prompt.context + first - window + 1
            first_key = max(0, seen_from - prompt.first_key)
        keys = slice(num_sinks + first_key, num_sinks + num_keys)
        if is_whole:
            band = q_THC.new_full((stop - first, num_keys), -torch.inf).triu_(first + 1)
        else:
            assert plan.band_QS is not None, "the plan of such a slice has a band"
            column = plan.band_QS.shape[1] - (num_keys - first_key)
            band = _aligned(plan.band_QS[-(stop - first) :, column:])
        q, k, v, out = q_THC[first:stop], k_SGC[keys], v_SGV[keys], out_THV[first:stop]
        if scoring.is_usual:
            _attend_block(q, k, v, band, out, scoring.scale)
            continue
        if num_sinks:
            k, v = (torch.cat([x_SGC[:num_sinks], x]) for x_SGC, x in ((k_SGC, k), (v_SGV, v)))
            seen_to = torch.arange(prompt.context + first, prompt.context + stop, device=q.device)
            is_late_TS = torch.arange(num_sinks, device=q.device) > seen_to[:, None]
            late = band.new_zeros(is_late_TS.shape).masked_fill_(is_late_TS, -torch.inf)
            band = torch.cat([late, band], 1)
        _attend_scored(q, k, v, band, out, scoring.of(slice(first, stop)))


def _attend_block(
    q_THC: Tensor,
    k_SGC: Tensor,
    v_SGV: Tensor,
    mask_TS: Tensor | None,
    out_THV: Tensor,
    scale: float,
) -> None:
    """One fused product. KV heads take the place of the batch, so that the query heads sharing
    one can see it as a repeated view: nothing is copied."""
    num_kv_heads = k_SGC.shape[1]
    num_shared = q_THC.shape[1] // num_kv_heads
    q_GHTC = _by_kv_head(q_THC, num_kv_heads)
    k_GHSC = k_SGC.transpose(0, 1)[:, None].expand(-1, num_shared, -1, -1)
    v_GHSV = v_SGV.transpose(0, 1)[:, None].expand(-1, num_shared, -1, -1)
    out = F.scaled_dot_product_attention(
        q_GHTC, k_GHSC, v_GHSV, attn_mask=mask_TS, is_causal=mask_TS is None, scale=scale
    )
    _by_kv_head(out_THV, num_kv_heads).copy_(out)


def _attend_scored(
    q_THC: Tensor,
    k_SGC: Tensor,
    v_SGV: Tensor,
    mask_TS: Tensor,
    out_THV: Tensor,
    scoring: Scoring,
) -> None:
    """The same where the first keys are sinks, or softmaxes have scores without a key."""
    num_kv_heads = k_SGC.shape[1]
    k_G1SC, v_G1SV = k_SGC.transpose(0, 1)[:, None], v_SGV.transpose(0, 1)[:, None]
    arranged = partial(_by_kv_head, num_kv_heads=num_kv_heads)
    heads = (num_kv_heads, -1, 1, 1)
    weights = _weights(scoring, arranged, q_THC, k_G1SC, mask_TS, heads)
    _by_kv_head(out_THV, num_kv_heads).copy_(weights.to(v_SGV.dtype) @ v_G1SV)


def _by_kv_head(x_THC: Tensor, num_kv_heads: int) -> Tensor:
    """A view, [G, heads that share it, T, C]."""
    num_tokens, num_heads, head_dim = x_THC.shape
    heads = (num_kv_heads, num_heads // num_kv_heads)
    return x_THC.view(num_tokens, *heads, head_dim).permute(1, 2, 0, 3)


def _weights(
    scoring: Scoring,
    arranged: Callable[[Tensor], Tensor],
    q_THC: Tensor,
    k_XSC: Tensor,
    mask_XTS: Tensor,
    heads: tuple[int, ...],
) -> Tensor:
    """Softmax of the scores of every query and key, [X, T, S] in float32. `arranged` gives queries
    the order of the keys; scores without a key have the shape `heads` there."""
    scores_XTS = (arranged(q_THC) @ k_XSC.mT).float()
    if scoring.sinks is not None:
        num_sinks, turned_THC = scoring.sinks
        scores_XTS[..., :num_sinks] = arranged(turned_THC) @ k_XSC[..., :num_sinks, :].mT
    scores_XTS.mul_(scoring.scale).add_(mask_XTS)
    if scoring.sink_scores_H is None:
        return scores_XTS.softmax(-1)
    return softmax_beside(scores_XTS, scoring.sink_scores_H.view(heads))


def softmax_beside(scores_XTS: Tensor, beside_XT1: Tensor) -> Tensor:
    """Softmax of scores in place, in which one more takes part that has no key."""
    largest_XT1 = torch.maximum(scores_XTS.amax(-1, keepdim=True), beside_XT1)
    scores_XTS.sub_(largest_XT1).exp_()
    total_XT1 = scores_XTS.sum(-1, keepdim=True).add_((beside_XT1 - largest_XT1).exp_())
    return scores_XTS.div_(total_XT1)


def _aligned(mask_QS: Tensor) -> Tensor:
    """A copy whose rows begin where kernels of a GPU can read 16 numbers at once: torch's
    memory-efficient attention looks at strides only, and crashes, or reads what is not there, where
    the first row begins elsewhere."""
    num_queries, num_keys = mask_QS.shape
    room = mask_QS.new_empty(num_queries, -(-num_keys // _MASK_STEP) * _MASK_STEP)
    return room[:, :num_keys].copy_(mask_QS)
