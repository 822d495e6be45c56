"""Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one latent per token.

Tokens that attend to latents as they are have their queries brought to these, and the results back
("absorbed": section 2.1.2); slices that are long enough have keys and values made of the latents.

Shape letters: N rows after bucketing, S cached positions, D hidden, H query heads, C head size of
queries and keys, P its part without positions, V head size of values, L width of a latent.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import Parts, Qkv
from moebatch.model.attention.choosing import IndexerBlock, learnt_scales
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.grouped import put_out
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.products import Weights
from moebatch.model.rope import Angles
from moebatch.model.scratch import Frame
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.shape import ModelShape


class LatentAttentionBlock:
    """With compressed queries or without."""

    def __init__(
        self, shape: ModelShape, attention: Attention, operators: Operators, core: AttentionCore
    ) -> None:
        assert isinstance(attention, LatentAttention), "the family's own attention"
        self._attention = attention
        self._products, self._elementwise = operators
        self._core = core
        self._indexer = None
        if attention.own_indexer is not None:
            self._indexer = IndexerBlock(attention.own_indexer, self._products, self._rotate_last)

    def project(self, work: LayerWork) -> Qkv:
        """Queries as they meet latents, and latents with the rotated keys behind them."""
        q_NHC, latents = self._projected(work, self._compressed(work)[0])
        absorbed_NHC = self._absorbed(work, q_NHC[: len(latents)], slice(None))
        return Qkv(absorbed_NHC, (latents,))

    def output(self, work: LayerWork, out_NHV: Tensor) -> Tensor:
        """What attention adds to the hidden states, [N, D]; the core's results are sums of latents,
        [N, H, L]."""
        results_NHV = self._results_room(work.frame, len(out_NHV))
        self._bring_back(out_NHV, work.weights, results_NHV)
        is_gated = self._attention.gate == "with queries"
        return self._put_out(work, results_NHV, self._compressed(work)[0] if is_gated else None)

    def attend(self, work: LayerWork) -> Tensor:
        """All of it, where the core and the cache are on the device of the weights."""
        seen, compressed = self._compressed(work)
        q_NHC, latents = self._projected(work, seen)
        core, micro_batch, layer = self._core, work.micro_batch, work.layer
        if self._indexer is not None:
            self._indexer.choose(work, compressed, core)
        parts = work.parts[:1]
        some = self._in_few_counts(core.plan_of(layer, micro_batch).as_cached, len(q_NHC))
        qkv = Qkv(self._absorbed(work, q_NHC, some), (latents,))
        sums_NHL = work.frame.take(*q_NHC.shape[:2], self._attention.kv_rank)
        core.attend(layer, qkv, micro_batch, parts, sums_NHL)
        results_NHV = self._results_room(work.frame, len(q_NHC))
        self._bring_back(sums_NHL[some], work.weights, results_NHV[some])

        def expand(cached_S1C: Tensor) -> Iterator[tuple[slice, Parts]]:
            return self._expanded(work.frame.branch(), cached_S1C[:, 0], work.weights)

        core.attend_expanded(layer, q_NHC, micro_batch, parts, expand, results_NHV)
        return self._put_out(work, results_NHV[: len(latents)], seen)

    def _put_out(self, work: LayerWork, results_NHV: Tensor, seen: Tensor | None) -> Tensor:
        """What attention adds; `seen` is what queries have been made of, where these are with
        gates."""
        attention, gate_NX = self._attention, None
        if attention.gate == "with queries":
            assert seen is not None, "gates lie with queries"
            gate_NX = work.frame.branch().take(len(seen), attention.gate_width)
            weight = work.weights["gated_q_b"][attention.query_width :]
            self._products.linear(seen, weight, None, gate_NX)
        return put_out(work, attention, results_NHV, self._products, gate_NX)

    def _compressed(self, work: LayerWork) -> tuple[Tensor, Tensor]:
        """What queries are made of, and of it what an indexer takes: compressed queries; what the
        layer sees where there are none."""
        attention, frame = self._attention, work.frame
        if attention.query_rank is None:
            return work.normed_ND, work.normed_ND
        compressed = self._products.of_role(frame, work.normed_ND, work.weights, "q_a")
        num_rows, width = compressed.shape
        joined = frame.take(num_rows, 2 * width) if attention.joins_compressed else None
        if joined is not None:
            joined[:, width:] = compressed
        self._norm(work, compressed[: work.num_tokens], "q_a_norm")
        if joined is None:
            return compressed, compressed
        joined[:, :width] = compressed
        return joined, compressed

    def _projected(self, work: LayerWork, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries, [N, H, C], with room behind them for as many rows as a library's
        products take; and what is cached, [N, 1, L + rotated key]."""
        attention, frame, weights = self._attention, work.frame, work.weights
        normed_ND, num_tokens = work.normed_ND, work.num_tokens
        num_rows, roles = len(normed_ND), ("q", "q_b", "gated_q_b")
        q = frame.take(self._products.library_rows(num_rows), attention.query_width)
        weight = next(weights[role] for role in roles if role in weights)
        self._products.linear(seen, weight[: attention.query_width], None, q[:num_rows])
        cached = self._products.of_role(frame, normed_ND, weights, "kv_a")
        latents_TL = cached[:num_tokens, : attention.kv_rank]
        self._norm(work, latents_TL, "kv_a_norm")
        if attention.latent_scale != 1:
            latents_TL.mul_(attention.latent_scale)
        q_NHC, latents = q.view(len(q), -1, attention.head_dim), cached[:, None]
        if attention.norms_positioned:
            self._norm(work, cached[:num_tokens, attention.kv_rank :], "k_rope_norm")
        rotating = (q_NHC[..., attention.nope_head_dim :], latents[..., attention.kv_rank :])
        angles = work.angles
        for y in rotating if attention.rotary_dim else ():
            self._elementwise.rotate(y[:num_tokens], angles.cos_TR, angles.sin_TR)
        if (scales := angles.query_scales_T11) is not None:
            if attention.learns_temperature:
                scales = learnt_scales(frame, weights, "query", scales)
            q_NHC[:num_tokens].mul_(scales)
        return q_NHC, latents

    def _norm(self, work: LayerWork, x_TX: Tensor, role: str) -> None:
        eps = self._attention.norm_eps
        self._elementwise.norm(work.frame, x_TX, work.weights[role], eps)

    def _rotate_last(self, x_THC: Tensor, angles: Angles) -> None:
        """The last numbers of each head, whatever its size, where any do."""
        if not self._attention.rotary_dim:
            return
        rotating = x_THC[..., -self._attention.rope_head_dim :]
        self._elementwise.rotate(rotating, angles.cos_TR, angles.sin_TR)

    def _absorbed(self, work: LayerWork, q_NHC: Tensor, rows: slice) -> Tensor:
        """Queries as they meet latents; those of other rows are garbage."""
        attention, (keys_HPL, _) = self._attention, self._up(work.weights)
        num_rows, num_heads, _ = q_NHC.shape
        absorbed = work.frame.take(num_rows, num_heads, attention.cached_key_dim)
        plain, rotated = torch.split(
            q_NHC[rows], [attention.nope_head_dim, attention.rope_head_dim], dim=2
        )
        self._products.by_head(plain, keys_HPL, absorbed[rows][..., : attention.kv_rank])
        absorbed[rows][..., attention.kv_rank :] = rotated
        return absorbed

    def _bring_back(self, sums_NHL: Tensor, weights: Weights, results_NHV: Tensor) -> None:
        _, values_HVL = self._up(weights)
        self._products.by_head(sums_NHL, values_HVL.mT, results_NHV)

    def _expanded(
        self, frame: Frame, cached_SC: Tensor, weights: Weights
    ) -> Iterator[tuple[slice, Parts]]:
        """Keys and values of what is cached, some heads after the others."""
        attention, (keys_HPL, values_HVL) = self._attention, self._up(weights)
        num_cached, at_once = len(cached_SC), attention.heads_expanded_at_once(len(cached_SC))
        keys_SHC = frame.take(num_cached, at_once, attention.head_dim)
        values_SHV = frame.take(num_cached, at_once, attention.value_head_dim)
        latents_SL, rotated_SR = torch.split(
            cached_SC, [attention.kv_rank, attention.rope_head_dim], dim=1
        )
        keys_SHC[..., attention.nope_head_dim :] = rotated_SR[:, None]
        for first in range(0, attention.num_heads, at_once):
            heads = slice(first, min(first + at_once, attention.num_heads))
            count = heads.stop - first
            plain_SHP = keys_SHC[:, :count, : attention.nope_head_dim]
            self._products.in_parts(latents_SL, keys_HPL[heads], plain_SHP)
            self._products.in_parts(latents_SL, values_HVL[heads], values_SHV[:, :count])
            if count < at_once:  # heads of a token lie side by side
                last = keys_SHC[:, :count].contiguous(), values_SHV[:, :count].contiguous()
                yield heads, last
            else:
                yield heads, (keys_SHC, values_SHV)

    def _up(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """From latents to keys without positions, [H, P, L], and to values, [H, V, L]."""
        attention = self._attention
        num_keys = attention.num_heads * attention.nope_head_dim
        num_values = attention.num_heads * attention.value_head_dim
        keys, values = torch.split(weights["kv_b"], [num_keys, num_values])
        return (
            keys.view(attention.num_heads, -1, attention.kv_rank),
            values.view(attention.num_heads, -1, attention.kv_rank),
        )

    def _results_room(self, frame: Frame, num_rows: int) -> Tensor:
        return frame.take(num_rows, self._attention.num_heads, self._attention.value_head_dim)

    def _in_few_counts(self, rows: slice, num_rows: int) -> slice:
        """These rows and others around them, of so many. Few counts are in use, since each costs a
        library for products some memory; what becomes of the others is garbage."""
        count = rows.stop - rows.start
        if not count:
            return rows
        wanted = self._products.library_rows(count)
        start = min(rows.start, num_rows - wanted)
        return slice(start, start + wanted)
