"""Attention to a window and to entries that stand for several tokens each (DeepSeek-V4, section
2.3). Sequences are attended one after the other.

Shape letters: T tokens of the micro-batch, N rows after bucketing, Q queries of a block, S places
and entries that are seen, B entries that are made, J tokens of one, D hidden, H query heads, C head
size (I of the indexer), W numbers of a token that entries are made of, X all that is kept of it for
these, G groups of heads, J and R what one is compressed from and to.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import LayerKv, Parts, Qkv
from moebatch.model.attention.choosing import index_keys, index_scores
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.plan import Sight
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.model.elementwise import Elementwise
from moebatch.model.products import Products
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


class Choosing(NamedTuple):
    """With what tokens of a micro-batch choose among entries."""

    q_THI: Tensor
    shares_TH: Tensor

    def of(self, tokens: slice) -> "Choosing":
        """Views of some rows."""
        return Choosing(self.q_THI[tokens], self.shares_TH[tokens])


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

    def output(
        self, frame: Frame, normed_ND: Tensor, out_NHV: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """What attention adds to the hidden states, [N, D]."""
        attention = self._attention
        num_rows, groups = len(out_NHV), attention.output_groups
        grouped_NGJ = out_NHV.reshape(num_rows, groups, -1)
        inner_NGR = frame.take(num_rows, groups, attention.output_rank)
        by_group = weights["o_a"].view(groups, attention.output_rank, -1).mT
        self._products.by_head(grouped_NGJ, by_group, inner_NGR)
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
        compressed = self._products.of_role(frame, normed_ND, weights, "q_a")
        self._norm(frame, compressed[:num_tokens], weights["q_a_norm"])
        q = self._products.of_role(frame, compressed, weights, "q_b")
        q_NHC = q.view(len(q), -1, attention.head_dim)
        self._norm(frame, q_NHC[:num_tokens], self._ones_C)
        self._rotate(q_NHC[:num_tokens], angles)
        key_N1C = self._products.of_role(frame, normed_ND, weights, "key")[:, None]
        key_T1C = key_N1C[:num_tokens]
        self._norm(frame, key_T1C, weights["key_norm"])
        self._rotate(key_T1C, angles)
        plan = micro_batch.by_window[self._windows[layer]]
        kv = core.layer_kv(layer, parts[:1])
        kv.write(plan.new_rows_T, (key_T1C,))
        kinds = self._kinds(frame, normed_ND, num_tokens, weights, parts[1:])
        choosing = self._choosing(frame, normed_ND, compressed, angles, num_tokens, weights)
        out_NHC = frame.take(*q_NHC.shape)
        window = self._windows[layer]
        for span in plan.spans:
            first = span.start - micro_batch.start
            tokens = slice(first, first + span.num_tokens)
            entries = list[Tensor]()
            for kind in kinds:
                made = micro_batch.entry_angles[attention]
                of_span = Angles(made.cos_TR[tokens], made.sin_TR[tokens])
                of_kind = kind._replace(kept_TX=kind.kept_TX[tokens])
                entries.append(self._entries(span, of_kind, of_span, weights))
            self._attend_span(
                frame.branch(),
                span,
                window,
                q_NHC[tokens],
                kv,
                entries,
                choosing and choosing.of(tokens),
                weights,
                out_NHC[tokens],
            )
        self._rotate(out_NHC[:num_tokens], Angles(angles.cos_TR, -angles.sin_TR))
        return self.output(frame, normed_ND, out_NHC, weights)

    def _kinds(
        self,
        frame: Frame,
        normed_ND: Tensor,
        num_tokens: int,
        weights: Mapping[str, Tensor],
        state: Parts,
    ) -> list[EntryKind]:
        """What entries of each kind are made of; `state` is that of all kinds."""
        kinds = list[EntryKind]()
        for name, size in self._attention.kinds_of_entries.items():
            kept_TX = frame.take(num_tokens, 2 * self._attention.width_of(size))
            halves = kept_TX.tensor_split(2, dim=1)
            for half_TW, role in zip(halves, (f"{name}_value", f"{name}_weight"), strict=True):
                half_TW.copy_(self._products.of_role(frame, normed_ND, weights, role)[:num_tokens])
            first = 2 * len(kinds)
            kinds.append(EntryKind(name, kept_TX, state[first : first + 2]))
        return kinds

    def _choosing(
        self,
        frame: Frame,
        normed_ND: Tensor,
        compressed_NR: Tensor,
        angles: Angles,
        num_tokens: int,
        weights: Mapping[str, Tensor],
    ) -> Choosing | None:
        if self._attention.indexer is None:
            return None
        q = self._products.of_role(frame, compressed_NR, weights, "index_q")[:num_tokens]
        q_THI = q.view(num_tokens, self._attention.indexer.num_heads, -1)
        self._rotate(q_THI, angles)
        shares_NH = self._products.of_role(frame, normed_ND, weights, "index_weights")
        return Choosing(q_THI, shares_NH[:num_tokens])

    def _norm(self, frame: Frame, x: Tensor, weight: Tensor) -> None:
        room = frame.branch().take_float(*x.shape)
        self._elementwise.rms_norm(x, weight, self._eps, room, x)

    def _rotate(self, x_THC: Tensor, angles: Angles) -> None:
        """The last numbers of each head, whatever its size."""
        rotating = x_THC[..., -self._attention.rope_head_dim :]
        rotate_neighbours(rotating, angles.cos_TR, angles.sin_TR)

    def _entries(
        self, span: Span, kind: EntryKind, angles: Angles, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Entries of all tokens up to the span's last ones, which are made where they are
        complete."""
        entries, (name, new_TX, state) = self._attention.entries, kind
        assert entries is not None, "the layer has some"
        size, num_before, width = entries.num_tokens, span.num_before, new_TX.shape[1] // 2
        kept_JX, entries_BC = (part[span.state_row] for part in state)
        first, stop = num_before // size, (num_before + span.num_tokens) // size
        if stop > first:
            begin = max(0, first - entries.overlap) * size
            places = torch.arange(begin, num_before, device=kept_JX.device) % entries.num_kept
            all_TX = torch.cat([kept_JX[places], new_TX[: stop * size - num_before]])
            values, scores = all_TX.view(-1, size, 2 * width).tensor_split(2, dim=-1)
            made_BC = self._made(values, scores + weights[f"{name}_bias"], first - begin // size)
            room = torch.empty_like(made_BC, dtype=torch.float32)
            self._elementwise.rms_norm(made_BC, weights[f"{name}_norm"], self._eps, room, made_BC)
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

    def _attend_span(
        self,
        frame: Frame,
        span: Span,
        window: int | None,
        q_THC: Tensor,
        kv: LayerKv,
        entries: Sequence[Tensor],
        choosing: Choosing | None,
        weights: Mapping[str, Tensor],
        out_THC: Tensor,
    ) -> None:
        """`entries` are those that are seen, and perhaps keys of these."""
        attention, device = self._attention, q_THC.device
        rows = torch.from_numpy(Sight(window).rows(span)).to(device)
        keys_SC, end = kv.read(rows)[0][:, 0], span.num_before + span.num_tokens
        seen_S = torch.arange(end - len(rows), end, device=device)
        if entries:
            keys_SC = torch.cat([keys_SC, entries[0]])
        sinks_H1 = weights["sink_scores"].float()[:, None]
        for block in chunks(attention.queries_at_once(len(keys_SC)), slice(0, span.num_tokens)):
            first, stop = span.num_before + block.start, span.num_before + block.stop
            at_Q1 = torch.arange(first, stop, device=device)[:, None]
            is_hidden_QS = seen_S > at_Q1
            if window is not None:
                is_hidden_QS |= seen_S <= at_Q1 - window
            if entries:
                chosen = choosing and (choosing.of(block), entries[1])
                hidden_QB = self._hidden_entries(frame.branch(), at_Q1, len(entries[0]), chosen)
                is_hidden_QS = torch.cat([is_hidden_QS, hidden_QB], dim=1)
            _attend_block(
                frame.branch(),
                q_THC[block],
                keys_SC,
                is_hidden_QS,
                sinks_H1,
                attention.scale,
                out_THC[block],
            )

    def _hidden_entries(
        self,
        frame: Frame,
        at_Q1: Tensor,
        num_entries: int,
        choosing: tuple[Choosing, Tensor] | None,
    ) -> Tensor:
        """Entries of tokens that are not all there at a query, and those that it does not choose by
        their keys."""
        entries, indexer = self._attention.entries, self._attention.indexer
        assert entries is not None, "the layer has some"
        numbers_B = torch.arange(num_entries, device=at_Q1.device)
        is_later_QB = numbers_B >= (at_Q1 + 1) // entries.num_tokens
        if choosing is None or indexer is None or num_entries <= indexer.most:
            return is_later_QB
        (q_QHI, shares_QH), keys_BI = choosing
        keys_BI = index_keys(frame, keys_BI)
        scores_QB = index_scores(frame, self._products, q_QHI, shares_QH, keys_BI)
        chosen_QK = scores_QB.masked_fill_(is_later_QB, -torch.inf).topk(indexer.most).indices
        is_unchosen_QB = torch.ones_like(is_later_QB).scatter_(1, chosen_QK, False)
        return is_unchosen_QB.logical_or_(is_later_QB)


def _attend_block(
    frame: Frame,
    q_QHC: Tensor,
    keys_SC: Tensor,
    is_hidden_QS: Tensor,
    sinks_H1: Tensor,
    scale: float,
    out_QHC: Tensor,
) -> None:
    """A softmax over keys, which are their own values, and over scores without a key."""
    num_queries, num_heads, head_dim = q_QHC.shape
    product_QHS = frame.take(num_queries, num_heads, len(keys_SC))
    torch.mm(q_QHC.reshape(-1, head_dim), keys_SC.T, out=product_QHS.flatten(0, 1))
    scores_QHS = frame.take_float(*product_QHS.shape).copy_(product_QHS).mul_(scale)
    scores_QHS.masked_fill_(is_hidden_QS[:, None], -torch.inf)
    largest_QH1 = torch.maximum(scores_QHS.amax(-1, keepdim=True), sinks_H1)
    scores_QHS.sub_(largest_QH1).exp_()
    total_QH1 = scores_QHS.sum(-1, keepdim=True).add_((sinks_H1 - largest_QH1).exp_())
    shares_QHS = product_QHS.copy_(scores_QHS.div_(total_QH1))
    out_QHC.copy_((shares_QHS.flatten(0, 1) @ keys_SC).view(out_QHC.shape))
