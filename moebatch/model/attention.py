"""Attention over a KV cache of flat rows, without padding between sequences.

Shape letters: T tokens of the micro-batch, B decoding sequences, S positions, H query heads,
G KV heads, C head size, V that of values, R rows of the cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model.attention_plan import QUERY_BLOCK, AttentionPlan, DecodeGroup, PromptSlice
from moebatch.model.cached_numbers import decode, encode
from moebatch.model.native.sink_queries import SinkQueries
from moebatch.spec.cache_layout import CacheDtype

_SCORED_BLOCK = 64
"""Queries that are attended at a time where their scores lie in memory: no fused product meets keys
with two queries, or knows scores without a key."""
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
        """All of them."""
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
    scale: float
    """By what scores are multiplied."""
    cached_in: CacheDtype | None = None
    """Keys and values are codes and scales; None is the numbers themselves."""

    @property
    def cached(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they are cached."""
        return keys_and_values(self.parts, self.value_dim)

    def write(self, rows_T: Tensor, new: Parts) -> None:
        """Stores what there is of new tokens."""
        for part_RGC, new_TGC in zip(self.parts, new, strict=True):
            part_RGC.index_copy_(0, rows_T, self._stored(new_TGC, part_RGC.dtype))

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values of these rows in the compute dtype; valid until the next read."""
        pairs = zip(self.parts, self.rooms, strict=True)
        read = tuple(self._rows_of(part_RGC, rows, room_SGC) for part_RGC, room_SGC in pairs)
        return keys_and_values(read, self.value_dim)

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


def attend(
    qkv: Qkv,
    plan: AttentionPlan,
    kv: LayerKv,
    out_THV: Tensor,
    sinks: SinkQueries | None = None,
    sink_scores_H: Tensor | None = None,
) -> None:
    """Attention of all tokens to what `plan` lets them see; writes every row of `out_THV`.

    The new keys and values must be in the cache already. `sinks` are there if the plan has such.
    `sink_scores_H`, in float32, take part in the softmax of each head as one key more would whose
    value is nothing (gpt-oss; with a score of zero Miller's "softmax one", 2023).
    """
    for group in plan.decodes:
        _attend_decodes(qkv.q_THC, group, kv, out_THV, sinks, sink_scores_H)
    for prompt in plan.prompts:
        new = qkv.of(prompt.tokens)
        if not prompt.context and kv.cached_in is None:
            k, v = keys_and_values(new.parts, kv.value_dim)
        else:
            k, v = kv.read(prompt.rows)
        met, out = sinks and sinks.of(prompt.tokens), out_THV[prompt.tokens]
        attend_prompt(new.q_THC, k, v, prompt, plan, out, kv.scale, met, sink_scores_H)


def _attend_decodes(
    q_THC: Tensor,
    group: DecodeGroup,
    kv: LayerKv,
    out_THV: Tensor,
    sinks: SinkQueries | None,
    sink_scores_H: Tensor | None,
) -> None:
    """One query per sequence. Query heads that share a KV head are rows of one product."""
    num_seqs, num_positions = group.rows_BS.shape
    k_BGSC, v_BGSV = (
        x_XGC.view(num_seqs, num_positions, *x_XGC.shape[1:]).transpose(1, 2)
        for x_XGC in kv.read(group.rows_BS.view(-1))
    )
    num_kv_heads, head_dim = k_BGSC.shape[1], k_BGSC.shape[3]
    q_BGHC = q_THC.index_select(0, group.tokens_B).view(num_seqs, num_kv_heads, -1, head_dim)
    if sinks is None and sink_scores_H is None:
        out = F.scaled_dot_product_attention(
            q_BGHC, k_BGSC, v_BGSV, attn_mask=group.mask_B11S, scale=kv.scale
        )
    else:
        met = sinks and sinks.of(group.tokens_B)
        met = met and met.with_queries(met.q_THC.view(q_BGHC.shape))
        scores = _scores(q_BGHC, k_BGSC, met, kv.scale)
        beside = None if sink_scores_H is None else sink_scores_H.view(num_kv_heads, -1, 1)
        out = _weights(scores.add_(group.mask_B11S), beside).to(v_BGSV.dtype) @ v_BGSV
    out_THV.index_copy_(0, group.tokens_B, out.reshape(num_seqs, *out_THV.shape[1:]))


def attend_prompt(
    q_THC: Tensor,
    k_SGC: Tensor,
    v_SGV: Tensor,
    prompt: PromptSlice,
    plan: AttentionPlan,
    out_THV: Tensor,
    scale: float,
    sinks: SinkQueries | None = None,
    sink_scores_H: Tensor | None = None,
) -> None:
    """Queries of one sequence, in blocks where causal attention alone does not do. Keys and values
    are those of the prompt's rows."""
    window, num_sinks = plan.sight
    is_whole = prompt.context == 0 and (window is None or prompt.num_tokens <= window)
    is_fused = sinks is None and sink_scores_H is None
    if is_whole and is_fused:
        _attend_block(q_THC, k_SGC, v_SGV, None, out_THV, scale)
        return
    block = QUERY_BLOCK if is_fused else _SCORED_BLOCK
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
        if is_fused:
            _attend_block(q, k, v, band, out, scale)
            continue
        if sinks is not None:
            k, v = (torch.cat([x_SGC[:num_sinks], x]) for x_SGC, x in ((k_SGC, k), (v_SGV, v)))
            seen_to = torch.arange(prompt.context + first, prompt.context + stop, device=q.device)
            is_late_TS = torch.arange(num_sinks, device=q.device) > seen_to[:, None]
            late = band.new_zeros(is_late_TS.shape).masked_fill_(is_late_TS, -torch.inf)
            band = torch.cat([late, band], 1)
        met = sinks and sinks.of(slice(first, stop))
        _attend_scored(q, k, v, band, out, scale, met, sink_scores_H)


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
    scale: float,
    sinks: SinkQueries | None,
    sink_scores_H: Tensor | None,
) -> None:
    """The same where the first keys are sinks, or softmaxes have scores without a key."""
    num_kv_heads = k_SGC.shape[1]
    k_G1SC, v_G1SV = k_SGC.transpose(0, 1)[:, None], v_SGV.transpose(0, 1)[:, None]
    met = sinks and sinks.with_queries(_by_kv_head(sinks.q_THC, num_kv_heads))
    scores = _scores(_by_kv_head(q_THC, num_kv_heads), k_G1SC, met, scale).add_(mask_TS)
    beside = None if sink_scores_H is None else sink_scores_H.view(num_kv_heads, -1, 1, 1)
    out_GHTV = _weights(scores, beside).to(v_SGV.dtype) @ v_G1SV
    _by_kv_head(out_THV, num_kv_heads).copy_(out_GHTV)


def _by_kv_head(x_THC: Tensor, num_kv_heads: int) -> Tensor:
    """A view, [G, heads that share it, T, C]."""
    num_tokens, num_heads, head_dim = x_THC.shape
    heads = (num_kv_heads, num_heads // num_kv_heads)
    return x_THC.view(num_tokens, *heads, head_dim).permute(1, 2, 0, 3)


def _scores(q_XTC: Tensor, k_XSC: Tensor, sinks: SinkQueries | None, scale: float) -> Tensor:
    """Of every query and key, [X, T, S] in float32."""
    scores_XTS = (q_XTC @ k_XSC.mT).float()
    if sinks is not None:
        keys_XSC = k_XSC[..., : sinks.num_sinks, :]
        scores_XTS[..., : sinks.num_sinks] = sinks.q_THC @ keys_XSC.mT
    return scores_XTS.mul_(scale)


def _weights(scores_XTS: Tensor, beside_XT1: Tensor | None) -> Tensor:
    """Softmax of scores, in their place, some perhaps with one score more `beside`."""
    if beside_XT1 is None:
        return scores_XTS.softmax(-1)
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
