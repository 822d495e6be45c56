"""Attention to a window and to entries that stand for several tokens each (DeepSeek-V4, section
2.3). Sequences are attended one after the other.

Shape letters: T tokens of the micro-batch, N rows after bucketing, Q queries of a block, S places
and entries that are seen, B entries that are made, J tokens of one, D hidden, H query heads, C head
size, W numbers of a token that entries are made of, X all that is kept of it for these, G groups of
heads, J and R what one is compressed from and to.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import LayerKv, Parts, Qkv, softmax_beside
from moebatch.model.attention.choosing import IndexerBlock, IndexQueries
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.plan import Sight
from moebatch.model.attention.span import Span
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.rope import Angles, rotate_neighbours
from moebatch.model.scratch import Frame, chunks
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.compressed_attention import CompressedAttention
from moebatch.spec.model.shape import ModelShape


class EntryKind(NamedTuple):
    """What is made of the tokens of a micro-batch for one kind of entries."""

    name: str
    kept_TX: Tensor
    """What entries are made of, weights behind."""
    state: Parts
    """What is kept of sequences: of tokens without an entry, and entries."""


class SpanWork(NamedTuple):
    """Attention of new tokens of one sequence."""

    span: Span
    q_THC: Tensor
    entries: Sequence[Tensor]
    """Those that there are, and perhaps keys of these."""
    choosing: IndexQueries | None
    """With what tokens choose among them."""
    out_THC: Tensor


class CompressedAttentionBlock:
    """All of it, sequence by sequence."""

    def __init__(
        self, shape: ModelShape, attention: Attention, operators: Operators, core: AttentionCore
    ) -> None:
        assert isinstance(attention, CompressedAttention), "the family's own attention"
        self._attention, self._eps = attention, shape.rms_eps
        self._windows = shape.sliding_windows
        self._products, self._elementwise = operators
        self._core = core
        self._indexer = None
        if attention.indexer is not None:
            self._indexer = IndexerBlock(attention.indexer, self._products, self._rotate)
        self._ones_C = torch.ones(attention.head_dim, device=operators.device)

    def project(self, work: LayerWork) -> Qkv:
        """Is not asked for: entries are made where weights are."""
        raise NotImplementedError

    def output(self, work: LayerWork, out_NHV: Tensor) -> Tensor:
        """What attention adds to the hidden states, [N, D]."""
        attention, weights = self._attention, work.weights
        num_rows, groups = len(out_NHV), attention.output_groups
        grouped_NGJ = out_NHV.reshape(num_rows, groups, -1)
        inner_NGR = work.frame.take(num_rows, groups, attention.output_rank)
        by_group = weights["o_a"].view(groups, attention.output_rank, -1).mT
        self._products.by_head(grouped_NGJ, by_group, inner_NGR)
        return self._products.of_role(work.frame, inner_NGR.flatten(1), weights, "o")

    def attend(self, work: LayerWork) -> Tensor:
        """All of it. Parts are keys of the window, and behind them those of the layer's state."""
        micro_batch, tokens, angles = work.micro_batch, slice(work.num_tokens), work.angles
        compressed_NR = self._projected(work, work.normed_ND, "q_a")
        self._norm(work, compressed_NR[tokens], work.weights["q_a_norm"])
        q_NX = self._projected(work, compressed_NR, "q_b")
        q_NHC = q_NX.view(len(q_NX), -1, self._attention.head_dim)
        self._norm(work, q_NHC[tokens], self._ones_C)
        self._rotate(q_NHC[tokens], angles)
        key_T1C = self._projected(work, work.normed_ND, "key")[tokens, None]
        self._norm(work, key_T1C, work.weights["key_norm"])
        self._rotate(key_T1C, angles)
        plan = self._core.plan_of(work.layer, micro_batch)
        kv = self._core.layer_kv(work.layer, work.parts[:1])
        kv.write(plan.new_rows_T, (key_T1C,))
        kinds = self._kinds(work)
        indexer = self._indexer
        choosing = indexer.queries(work, compressed_NR) if indexer else None
        out_NHC = work.frame.take(*q_NHC.shape)
        for span in plan.spans:
            own = span.tokens_from(micro_batch.start)
            entries = [self._entries(work, span, kind) for kind in kinds]
            chosen_by = choosing and choosing.of(own)
            of_span = SpanWork(span, q_NHC[own], entries, chosen_by, out_NHC[own])
            self._attend_span(work, of_span, kv)
        self._rotate(out_NHC[tokens], Angles(angles.cos_TR, -angles.sin_TR))
        return self.output(work, out_NHC)

    def _kinds(self, work: LayerWork) -> list[EntryKind]:
        """What entries of each kind are made of."""
        kinds, state = list[EntryKind](), work.parts[1:]
        for name, size in self._attention.kinds_of_entries.items():
            kept_TX = work.frame.take(work.num_tokens, 2 * self._attention.width_of(size))
            halves = kept_TX.tensor_split(2, dim=1)
            for half_TW, role in zip(halves, (f"{name}_value", f"{name}_weight"), strict=True):
                half_TW.copy_(self._projected(work, work.normed_ND, role)[: work.num_tokens])
            first = 2 * len(kinds)
            kinds.append(EntryKind(name, kept_TX, state[first : first + 2]))
        return kinds

    def _projected(self, work: LayerWork, x_NI: Tensor, role: str) -> Tensor:
        return self._products.of_role(work.frame, x_NI, work.weights, role)

    def _norm(self, work: LayerWork, x: Tensor, weight: Tensor) -> None:
        self._elementwise.norm(work.frame, x, weight, self._eps)

    def _rotate(self, x_THC: Tensor, angles: Angles) -> None:
        """The last numbers of each head, whatever its size."""
        rotating = x_THC[..., -self._attention.rope_head_dim :]
        rotate_neighbours(rotating, angles.cos_TR, angles.sin_TR)

    def _entries(self, work: LayerWork, span: Span, kind: EntryKind) -> Tensor:
        """Entries of all tokens up to the span's last ones, which are made where they are
        complete."""
        entries, (name, kept_TX, state), weights = self._attention.entries, kind, work.weights
        assert entries is not None, "the layer has some"
        own = span.tokens_from(work.micro_batch.start)
        new_TX, width = kept_TX[own], kept_TX.shape[1] // 2
        size, num_before = entries.num_tokens, span.num_before
        kept_JX, entries_BC = (part[span.state_row] for part in state)
        end = num_before + span.num_tokens
        first, stop = num_before // size, end // size
        if stop > first:
            begin = max(0, first - entries.overlap) * size
            places = torch.arange(begin, num_before, device=kept_JX.device) % entries.num_kept
            all_TX = torch.cat([kept_JX[places], new_TX[: stop * size - num_before]])
            values, scores = all_TX.view(-1, size, 2 * width).tensor_split(2, dim=-1)
            made_BC = self._made(values, scores + weights[f"{name}_bias"], first - begin // size)
            self._norm(work, made_BC, weights[f"{name}_norm"])
            last = slice(own.start + (first + 1) * size - 1 - num_before, own.stop, size)
            angles = work.angles.entries
            assert angles is not None, "the layer makes some"
            of_last = Angles(angles.cos_TR[last], angles.sin_TR[last])
            self._rotate(made_BC[:, None], of_last)
            entries_BC[first:stop] = made_BC
        some = min(entries.num_kept, span.num_tokens)
        places = torch.arange(end - some, end, device=kept_JX.device) % entries.num_kept
        kept_JX[places] = new_TX[-some:]
        return entries_BC[:stop]

    def _made(self, values_BJW: Tensor, scores_BJW: Tensor, num_skipped: int) -> Tensor:
        """Weighted means, [B, C], of tokens of all blocks but the first `num_skipped`, which are
        there for those behind them."""
        entries = self._attention.entries
        assert entries is not None, "the layer has some"
        if entries.overlap:
            C = values_BJW.shape[-1] // 2
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

    def _attend_span(self, work: LayerWork, own: SpanWork, kv: LayerKv) -> None:
        (span, q_THC, entries, choosing, out_THC), window = own, self._windows[work.layer]
        rows = torch.from_numpy(Sight(window).rows(span)).to(q_THC.device)
        keys_SC, end = kv.read(rows)[0][:, 0], span.num_before + span.num_tokens
        seen_S = torch.arange(end - len(rows), end, device=q_THC.device)
        if entries:
            keys_SC = torch.cat([keys_SC, entries[0]])
        sinks_H1 = work.weights["sink_scores"].float()[:, None]
        at_once = self._attention.queries_at_once(len(keys_SC))
        for block in chunks(at_once, slice(0, span.num_tokens)):
            first, stop = span.num_before + block.start, span.num_before + block.stop
            at_Q1 = torch.arange(first, stop, device=q_THC.device)[:, None]
            is_hidden_QS = seen_S > at_Q1
            if window is not None:
                is_hidden_QS |= seen_S <= at_Q1 - window
            if entries:
                chosen_by, frame = choosing and choosing.of(block), work.frame.branch()
                hidden_QB = self._hidden_entries(frame, at_Q1, entries, chosen_by)
                is_hidden_QS = torch.cat([is_hidden_QS, hidden_QB], dim=1)
            frame = work.frame.branch()
            self._attend_block(frame, q_THC[block], keys_SC, is_hidden_QS, sinks_H1, out_THC[block])

    def _hidden_entries(
        self,
        frame: Frame,
        at_Q1: Tensor,
        entries: Sequence[Tensor],
        choosing: IndexQueries | None,
    ) -> Tensor:
        """Entries of tokens that are not all there at a query, and those that it does not choose by
        their keys."""
        of_all, num_entries = self._attention, len(entries[0])
        assert of_all.entries is not None, "the layer has some"
        numbers_B = torch.arange(num_entries, device=at_Q1.device)
        is_later_QB = numbers_B >= (at_Q1 + 1) // of_all.entries.num_tokens
        if choosing is None or self._indexer is None or num_entries <= self._indexer.most:
            return is_later_QB
        chosen_QK = self._indexer.chosen(frame, choosing, entries[1], is_later_QB)
        is_unchosen_QB = torch.ones_like(is_later_QB).scatter_(1, chosen_QK, False)
        return is_unchosen_QB.logical_or_(is_later_QB)

    def _attend_block(
        self,
        frame: Frame,
        q_QHC: Tensor,
        keys_SC: Tensor,
        is_hidden_QS: Tensor,
        sinks_H1: Tensor,
        out_QHC: Tensor,
    ) -> None:
        """A softmax over keys, which are their own values, and over scores without a key."""
        product_QHS = frame.take(*q_QHC.shape[:2], len(keys_SC))
        self._products.linear(q_QHC.flatten(0, 1), keys_SC, None, product_QHS.flatten(0, 1))
        scores_QHS = frame.take_float(*product_QHS.shape).copy_(product_QHS)
        scores_QHS.mul_(self._attention.scale).masked_fill_(is_hidden_QS[:, None], -torch.inf)
        shares_QHS = product_QHS.copy_(softmax_beside(scores_QHS, sinks_H1))
        shares_X1S, out_X1C = (x.flatten(0, 1)[:, None] for x in (shares_QHS, out_QHC))
        self._products.by_head(shares_X1S, keys_SC[None], out_X1C)
