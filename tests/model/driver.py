"""A small engine for tests: weights from safetensors files, a KV tensor, passes in plain order."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from moebatch.checkpoint.model_files import open_model
from moebatch.layout.scratch import Limits
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.model.decoder import Decoder
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.routing.gating import AdaptiveGating
from moebatch.model.routing.router import Routing
from moebatch.spec.model.cache_layout import KvCache, SinkWindow
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.stored_experts import StoredPiece
from moebatch.store.kv.tensors import KvShape

NUM_ROWS = 8192
NUM_STATES = 64
LIMITS = Limits(
    pass_tokens=512, micro_batch_tokens=300, context_tokens=128, gather_rows=256, expert_rows=24
)


@dataclass
class Seq:
    """One sequence: prompt, answer so far, and its rows in the cache."""

    prompt: list[int]
    rows: list[int]
    state_row: int = 0
    answer: list[int] = field(default_factory=list)
    num_cached: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_cached


class Driver:
    """Runs sequences together; how they are cut and grouped must not matter."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        limits: Limits = LIMITS,
        gating: AdaptiveGating | None = None,
        cached_in: KvCache = "full",
        sink_window: SinkWindow | None = None,
    ) -> None:
        self.files = open_model(folder, "auto")
        self.shape = self.files.shape.cached_in(cached_in).seen_through(sink_window)
        config = self.files.config
        self.folder, self.limits = folder, limits
        self._tensors = read_tensors(folder)
        self.weights = DenseWeights.load(replace(self.files, dtype=dtype))
        self.decoder = Decoder(
            self.shape, config, self.weights, limits, experts=self.files.experts, gating=gating
        )
        self.cached = [_cached(self.shape, layer, dtype) for layer in range(self.shape.num_layers)]
        self._free = list(range(NUM_ROWS))
        self._free_states = list(range(NUM_STATES))

    def sequence(self, prompt: Sequence[int], num_new: int, *, shuffled: bool = True) -> Seq:
        """A sequence with room for its answer, in scattered or in neighbouring rows."""
        if shuffled:
            random.Random(len(self._free)).shuffle(self._free)
        num_rows = len(prompt) + num_new
        rows, self._free = self._free[:num_rows], self._free[num_rows:]
        return Seq(list(prompt), rows, self._free_states.pop(len(prompt) % len(self._free_states)))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        *,
        slice_tokens: int = 10**6,
        micro_batch: int = 10**6,
        span_tokens: int = 10**6,
        stagger: int = 0,
        shuffled: bool = True,
    ) -> list[Seq]:
        """Greedy answers. Each `stagger` passes one more prompt joins; 0 lets all in at once."""
        seqs = [self.sequence(prompt, num_new, shuffled=shuffled) for prompt in prompts]
        for number in range(10**6):
            admitted = seqs if not stagger else seqs[: 1 + number // stagger]
            active = [seq for seq in admitted if len(seq.answer) < num_new]
            if not active and len(admitted) == len(seqs):
                return seqs
            work = [(seq, min(seq.num_pending, slice_tokens)) for seq in active]
            if work:
                self.run_pass(work, micro_batch=micro_batch, span_tokens=span_tokens)
        raise AssertionError("a pass must make progress")

    def run_pass(
        self,
        work: Sequence[tuple[Seq, int]],
        *,
        micro_batch: int = 10**6,
        span_tokens: int = 10**6,
    ) -> None:
        """Computes that many next tokens of each sequence, and samples where all are done."""
        with torch.inference_mode():
            micro_batches, tokens, ends = self.lay_out(work, micro_batch, span_tokens)
            x_TD = self.decoder.embed(torch.tensor(tokens))
            self.run_layers(x_TD, micro_batches)
            logits_RV = self.decoder.logits(x_TD[torch.tensor(ends)]).clone()
        for (seq, num_tokens), logits_V in zip(work, logits_RV, strict=True):
            seq.num_cached += num_tokens
            if seq.num_pending == 0:
                seq.logits.append(logits_V)
                seq.answer.append(int(logits_V.argmax()))

    def run_layers(self, x_TD: torch.Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        """All layers, experts in an order of no meaning."""
        decoder, shape = self.decoder, self.shape
        for layer in range(shape.num_layers):
            for micro in micro_batches:
                decoder.attend(layer, x_TD, micro, self.cached[layer])
            if not shape.is_moe(layer):
                decoder.add_dense(layer, x_TD)
                continue
            routing = decoder.route(layer, x_TD)
            self.run_experts(layer, routing)
            decoder.combine(layer, x_TD, routing)

    def run_experts(self, layer: int, routing: Routing) -> None:
        """All experts that were chosen, last one first."""
        for expert in reversed(routing.experts):
            tensors = map(self._slice, self.files.experts.pieces(layer, expert))
            self.decoder.run_experts(layer, routing, {expert: list(tensors)})

    def lay_out(
        self, work: Sequence[tuple[Seq, int]], micro_batch: int, span_tokens: int
    ) -> tuple[list[MicroBatch], list[int], list[int]]:
        """Micro-batches, all tokens, and the row of the last token of each sequence."""
        spans, tokens, ends = [], [], []
        for seq, num_tokens in work:
            stop = seq.num_cached + num_tokens
            spans.append(
                Span(
                    start=len(tokens),
                    num_tokens=num_tokens,
                    context=seq.num_cached,
                    rows_S=np.array(seq.rows[:stop]),
                    rope_length=len(seq.prompt),
                    state_row=seq.state_row,
                )
            )
            tokens += seq.tokens[seq.num_cached : stop]
            ends.append(len(tokens) - 1)
        spans = [piece for span in spans for piece in span.pieces(span_tokens)]
        groups = (spans[i : i + micro_batch] for i in range(0, len(spans), micro_batch))
        return [self.decoder.planner.plan(group) for group in groups], tokens, ends

    def _slice(self, piece: StoredPiece) -> torch.Tensor:
        tensor = self._tensors[piece.name]
        if piece.num_slices is not None:
            tensor = tensor.unflatten(0, (piece.num_slices, -1))
        return tensor if piece.index is None else tensor[piece.index]


def _cached(shape: ModelShape, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of a layer, with nothing in them that may be read."""
    parts: list[torch.Tensor] = []
    layouts = [(shape.attention_of(layer).cache, NUM_ROWS), (shape.state_of(layer), NUM_STATES)]
    for layout, num_rows in layouts[shape.is_recurrent(layer) :]:
        cached = KvShape(cache=layout, dtype=dtype) if layout else None
        for part in layout.parts if cached else ():
            of_part, width = cached.stored_as(part)
            nothing = torch.nan if of_part.is_floating_point else 255
            parts.append(torch.full((num_rows, part.num_heads, width), nothing, dtype=of_part))
    return tuple(parts)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return dict(_tensors(folder))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
