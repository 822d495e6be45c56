"""Attention to a window and to entries that stand for several tokens each (DeepSeek-V4, section
2.3). Sequences are attended one after the other.

Shape letters: T tokens of the micro-batch, N rows after bucketing, Q queries of a block, S places
and entries that are seen, B entries that are made, J tokens of one, D hidden, H query heads, C head
size, W numbers of a token that entries are made of, X all that is kept of it for these, G groups of
heads, I and R what one is compressed from and to.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import LayerKv, Parts, Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.plan import Sight
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.model.elementwise import Elementwise
from moebatch.model.products import Products
from moebatch.model.rope import Angles, rotate_neighbours
from moebatch.model.scratch import Frame
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.compressed_attention import CompressedAttention
from moebatch.spec.model.shape import ModelShape

_QUERY_BLOCK = 16
"""Queries of a sequence whose scores lie in memory at a time."""


class CompressedAttentionBlock:
    """All of it, by torch."""

    def __init__(
        self, shape: ModelShape, attention: Attention, products: Products, elementwise: Elementwise
    ) -> None:
        assert isinstance(attention, CompressedAttention), "the family's own attention"
        self._attention, self._eps = attention, shape.rms_eps
        self._windows = shape.sliding_windows
        self._products, self._elementwise = products, elementwise
        self._ones_C = torch.ones(attention.head_dim, device=products.device)

    def project(
        self,
        frame: Frame,
        normed_ND: Tensor,
        micro_batch: MicroBatch,
        weights: Mapping[str, Tensor],
    ) -> Qkv:
        """Is not asked for: entries are made where weights are."""
        raise NotImplementedError

    def output(self, frame: Frame, out_NHV: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """What attention adds to the hidden states, [N, D]."""
        attention = self._attention
        num_rows, groups = len(out_NHV), attention.output_groups
        grouped_NGI = out_NHV.reshape(num_rows, groups, -1)
        inner_NGR = frame.take(num_rows, groups, attention.output_rank)
        by_group = weights["o_a"].view(groups, attention.output_rank, -1).mT
        self._products.by_head(grouped_NGI, by_group, inner_NGR)
        return self._products.of_role(frame, inner_NGR.flatten(1), weights, "o")

    def attend(
        self,
        frame: Frame,
        layer: int,
        normed_ND: Tensor,
        micro_batch: MicroBatch,
        weights: Mapping[str, Tensor],
        core: AttentionCore,
        parts: Parts,
    ) -> Tensor:
        """All of it. `parts` are keys of the window, and behind them those of the layer's state."""
        attention, num_tokens = self._attention, micro_batch.num_tokens
        angles = micro_batch.angles[attention]
        q_NHC = self._queries(frame, normed_ND, angles, num_tokens, weights)
        key_N1C = self._products.of_role(frame, normed_ND, weights, "key")[:, None]
        key_T1C = key_N1C[:num_tokens]
        self._norm(frame, key_T1C, weights["key_norm"])
        self._rotate(key_T1C, angles)
        plan = micro_batch.by_window[self._windows[layer]]
        kv = core.layer_kv(layer, parts[:1])
        kv.write(plan.new_rows_T, (key_T1C,))
        kept_TX = None
        if attention.entries is not None:
            kept_TX = frame.take(num_tokens, 2 * attention.entry_width)
            halves = kept_TX.tensor_split(2, dim=1)
            for half_TW, role in zip(halves, ("entry_value", "entry_weight"), strict=True):
                half_TW.copy_(self._products.of_role(frame, normed_ND, weights, role)[:num_tokens])
        out_NHC = frame.take(*q_NHC.shape)
        window = self._windows[layer]
        for span in plan.spans:
            first = span.start - micro_batch.start
            tokens = slice(first, first + span.num_tokens)
            entries_BC = None
            if kept_TX is not None:
                made = micro_batch.entry_angles[attention]
                of_span = Angles(made.cos_TR[tokens], made.sin_TR[tokens])
                entries_BC = self._entries(span, kept_TX[tokens], of_span, weights, parts[1:])
            self._attend_span(span, window, q_NHC[tokens], kv, entries_BC, weights, out_NHC[tokens])
        self._rotate(out_NHC[:num_tokens], Angles(angles.cos_TR, -angles.sin_TR))
        return self.output(frame, out_NHC, weights)

    def _queries(
        self,
        frame: Frame,
        normed_ND: Tensor,
        angles: Angles,
        num_tokens: int,
        weights: Mapping[str, Tensor],
    ) -> Tensor:
        compressed = self._products.of_role(frame, normed_ND, weights, "q_a")
        self._norm(frame, compressed[:num_tokens], weights["q_a_norm"])
        q = self._products.of_role(frame, compressed, weights, "q_b")
        q_NHC = q.view(len(q), -1, self._attention.head_dim)
        self._norm(frame, q_NHC[:num_tokens], self._ones_C)
        self._rotate(q_NHC[:num_tokens], angles)
        return q_NHC

    def _norm(self, frame: Frame, x: Tensor, weight: Tensor) -> None:
        room = frame.branch().take_float(*x.shape)
        self._elementwise.rms_norm(x, weight, self._eps, room, x)

    def _rotate(self, x_THC: Tensor, angles: Angles) -> None:
        rotate_neighbours(x_THC[..., self._attention.rotated_from :], angles.cos_TR, angles.sin_TR)

    def _entries(
        self,
        span: Span,
        new_TX: Tensor,
        angles: Angles,
        weights: Mapping[str, Tensor],
        state: Parts,
    ) -> Tensor:
        """Entries of all tokens up to the span's last ones, which are made where they are
        complete."""
        entries, width = self._attention.entries, self._attention.entry_width
        assert entries is not None, "the layer has some"
        size, num_before = entries.num_tokens, span.num_before
        kept_JX, entries_BC = (part[span.state_row] for part in state)
        first, stop = num_before // size, (num_before + span.num_tokens) // size
        if stop > first:
            begin = max(0, first - entries.overlap) * size
            places = torch.arange(begin, num_before, device=kept_JX.device) % entries.num_kept
            all_TX = torch.cat([kept_JX[places], new_TX[: stop * size - num_before]])
            values, scores = all_TX.view(-1, size, 2 * width).tensor_split(2, dim=-1)
            made_BC = self._made(values, scores + weights["entry_bias"], first - begin // size)
            room = torch.empty_like(made_BC, dtype=torch.float32)
            self._elementwise.rms_norm(made_BC, weights["entry_norm"], self._eps, room, made_BC)
            last = slice((first + 1) * size - 1 - num_before, None, size)
            of_made = Angles(angles.cos_TR[last], angles.sin_TR[last])
            self._rotate(made_BC[:, None], of_made)
            entries_BC[first:stop] = made_BC
        some = min(entries.num_kept, span.num_tokens)
        end = num_before + span.num_tokens
        places = torch.arange(end - some, end, device=kept_JX.device) % entries.num_kept
        kept_JX[places] = new_TX[-some:]
        return entries_BC[:stop]

    def _made(self, values_BJW: Tensor, scores_BJW: Tensor, num_skipped: int) -> Tensor:
        """Weighted means, [B, C], of tokens of all blocks but the first `num_skipped`, which are
        there for those behind them."""
        entries, C = self._attention.entries, self._attention.head_dim
        assert entries is not None, "the layer has some"
        if entries.overlap:
            before = values_BJW[:-1, :, :C], scores_BJW[:-1, :, :C]
            if not num_skipped:  # nothing is before the first
                nothing = values_BJW[:1, :, :C]
                before = (
                    torch.cat([torch.zeros_like(nothing), before[0]]),
                    torch.cat([torch.full_like(scores_BJW[:1, :, :C], -torch.inf), before[1]]),
                )
            values_BJW = torch.cat([before[0], values_BJW[num_skipped:, :, C:]], dim=1)
            scores_BJW = torch.cat([before[1], scores_BJW[num_skipped:, :, C:]], dim=1)
        shares_BJW = scores_BJW.softmax(dim=1, dtype=torch.float32).to(values_BJW.dtype)
        return (values_BJW * shares_BJW).sum(dim=1)

    def _attend_span(
        self,
        span: Span,
        window: int | None,
        q_THC: Tensor,
        kv: LayerKv,
        entries_BC: Tensor | None,
        weights: Mapping[str, Tensor],
        out_THC: Tensor,
    ) -> None:
        rows = torch.from_numpy(Sight(window).rows(span)).to(q_THC.device)
        keys_SC, end = kv.read(rows)[0][:, 0], span.num_before + span.num_tokens
        seen_S = torch.arange(end - len(rows), end, device=rows.device)
        if entries_BC is not None:
            keys_SC = torch.cat([keys_SC, entries_BC])
        sinks_H1 = weights["sink_scores"].float()[:, None]
        for first in range(0, span.num_tokens, _QUERY_BLOCK):
            block = slice(first, min(first + _QUERY_BLOCK, span.num_tokens))
            at_Q1 = torch.arange(
                span.num_before + block.start, span.num_before + block.stop, device=rows.device
            )[:, None]
            is_hidden_QS = seen_S > at_Q1
            if window is not None:
                is_hidden_QS |= seen_S <= at_Q1 - window
            if entries_BC is not None:
                entries = self._attention.entries
                assert entries is not None, "the layer has some"
                numbers_B = torch.arange(len(entries_BC), device=rows.device)
                is_later_QB = numbers_B >= (at_Q1 + 1) // entries.num_tokens
                is_hidden_QS = torch.cat([is_hidden_QS, is_later_QB], dim=1)
            scores_QHS = (q_THC[block] @ keys_SC.T).float().mul_(self._attention.scale)
            scores_QHS.masked_fill_(is_hidden_QS[:, None], -torch.inf)
            sinks_QH1 = sinks_H1.expand(len(scores_QHS), -1, -1)
            shares = torch.cat([scores_QHS, sinks_QH1], dim=-1).softmax(dim=-1)[..., :-1]
            out_THC[block] = shares.to(keys_SC.dtype) @ keys_SC
