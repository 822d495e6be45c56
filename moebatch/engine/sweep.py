"""One walk through all layers, plainly in order: the reference that every schedule must equal.

Shape letters: T tokens of the pass, R rows of one block of logits, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.engine.batcher import Slice
from moebatch.engine.broken import BrokenRows
from moebatch.engine.sequence import Sequence as TokenSequence
from moebatch.model.batch import MicroBatch, Span
from moebatch.model.decoder import Decoder
from moebatch.plan.scratch import PROMPT_ROWS, logits_rows
from moebatch.predict.predictor import RoutingObserver
from moebatch.spec.policy import Policy
from moebatch.spec.shape import ModelShape
from moebatch.store.experts import ExpertKey, ExpertStore
from moebatch.store.kv import KVCache


class LogitsBlock(NamedTuple):
    """Logits of sequences whose known tokens have all been computed."""

    sequences: list[TokenSequence]
    logits_RV: Tensor
    rows: list[int]
    """Row of each sequence's last token in the pass."""
    broken: BrokenRows


class Sweep:
    """Takes slices of sequences through the model and hands out logits of their last tokens.

    Attention runs micro-batch by micro-batch; an expert runs once, over all tokens of the pass
    that chose it. While experts compute, those of the layers behind, and of the next pass, are
    read ahead, if the pass is so large that most of them will be chosen.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        experts: ExpertStore,
        policy: Policy,
        observer: RoutingObserver | None = None,
    ) -> None:
        """`observer` is told what the gates choose."""
        self._decoder = decoder
        self._observer = observer
        self._cache = cache
        self._experts = experts
        self._policy = policy
        self._logits_rows = logits_rows(decoder.shape, decoder.dtype.itemsize)

    @property
    def num_layers(self) -> int:
        """Layers of a walk."""
        return self._decoder.shape.num_layers

    def run(
        self, slices: Sequence[Slice], layer_begins: Callable[[int], None]
    ) -> Iterator[LogitsBlock]:
        """Yields the logits from which next tokens come, block by block.

        All slices are counted as cached when the first block is yielded. `layer_begins` is told
        of every layer.
        """
        groups = arrange(slices, self._policy.micro_batch_size)
        ordered = [piece for group in groups for piece in group]
        tokens = [t for piece in ordered for t in piece.sequence.pending_tokens(piece.num_tokens)]
        x_TD = self._decoder.embed(torch.tensor(tokens))
        broken = self._run_layers(x_TD, list(self._micro_batches(groups)), layer_begins)
        yield from self._logits(x_TD, ordered, broken)

    def give_up(self) -> None:
        """After a pass that failed: the next one may begin at the first layer again."""
        self._experts.forget_required()

    def _run_layers(
        self,
        x_TD: Tensor,
        micro_batches: Sequence[MicroBatch],
        layer_begins: Callable[[int], None],
    ) -> BrokenRows:
        decoder, shape, broken = self._decoder, self._decoder.shape, BrokenRows()
        if self._observer is not None:
            self._observer.begin_pass(len(x_TD))
        for layer in range(shape.num_layers):
            layer_begins(layer)
            for micro_batch in micro_batches:
                keys, values = self._cache.keys_RGC[layer], self._cache.values_RGC[layer]
                decoder.attend(layer, x_TD, micro_batch, keys, values)
            if not shape.is_moe(layer):
                decoder.add_dense(layer, x_TD)
                broken.look(x_TD, layer, None)
                continue
            routing = decoder.route(layer, x_TD)
            if self._observer is not None:
                experts_TK = routing.experts_TK.cpu().numpy()
                self._observer.observe(layer, slice(0, len(x_TD)), experts_TK)
            chosen = self._experts.require(layer, routing.experts)
            self._experts.announce(upcoming(shape, layer, num_tokens=len(x_TD)))
            with closing(chosen):
                for expert, tensors in chosen:
                    decoder.run_expert(layer, routing, expert, tensors)
            decoder.combine(layer, x_TD, routing)
            broken.look(x_TD, layer, routing)
        return broken

    def _micro_batches(self, groups: Sequence[Sequence[Slice]]) -> Iterator[MicroBatch]:
        start = 0
        for group in groups:
            spans = []
            for piece in group:
                spans.append(self._span(piece, start))
                start += piece.num_tokens
            if len(spans) == 1:  # one long slice is attended piece by piece
                for span in spans[0].pieces(PROMPT_ROWS):
                    yield self._decoder.micro_batch([span])
            else:
                yield self._decoder.micro_batch(spans)

    def _span(self, piece: Slice, start: int) -> Span:
        return Span(
            start=start,
            num_tokens=piece.num_tokens,
            context=piece.sequence.num_cached,
            rows_S=self._cache.rows(piece.sequence, piece.context),
            rope_length=piece.sequence.num_prompt_tokens,
        )

    def _logits(
        self, x_TD: Tensor, ordered: Sequence[Slice], broken: BrokenRows
    ) -> Iterator[LogitsBlock]:
        ends, end = [], -1
        for piece in ordered:
            end += piece.num_tokens
            piece.sequence.num_cached += piece.num_tokens
            if piece.sequence.num_pending == 0:
                ends.append((piece.sequence, end))
        for first in range(0, len(ends), self._logits_rows):
            block = ends[first : first + self._logits_rows]
            sequences, rows = [sequence for sequence, _ in block], [row for _, row in block]
            yield LogitsBlock(sequences, self._decoder.logits(x_TD[rows]), rows, broken)


def arrange(slices: Sequence[Slice], micro_batch_size: int) -> list[list[Slice]]:
    """Slices in micro-batches: decoding ones by length, so that padding is small, then prompts.

    A prompt slice of more than `PROMPT_ROWS` tokens is alone.
    """
    decoding = sorted((s for s in slices if s.num_tokens == 1), key=lambda s: s.context)
    groups = [
        decoding[first : first + micro_batch_size]
        for first in range(0, len(decoding), micro_batch_size)
    ]
    num_rows = PROMPT_ROWS
    for piece in (s for s in slices if s.num_tokens > 1):
        num_rows += piece.num_tokens
        if num_rows > PROMPT_ROWS or len(groups[-1]) >= micro_batch_size:
            groups.append([])
            num_rows = piece.num_tokens
        groups[-1].append(piece)
    return groups


def upcoming(shape: ModelShape, layer: int, *, num_tokens: int) -> Iterator[ExpertKey]:
    """Experts that will probably be needed after `layer`, in order, up to `layer` of the next pass.

    With even routing an expert is chosen by at least one of T tokens with probability
    1 - (1 - K/E)^T. Below one half nothing is worth reading before the gate has spoken.
    """
    share = shape.experts_per_token / shape.num_experts
    if 1 - (1 - share) ** num_tokens < 0.5:
        return
    layers = shape.moe_layers
    position = layers.index(layer) + 1
    for following in layers[position:] + layers[:position]:
        for expert in range(shape.num_experts):
            yield ExpertKey(following, expert)
