"""A pass laid out in rows: which sequence's tokens lie where, and in which micro-batch.

Shape letters: T tokens of the pass.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from math import ceil
from typing import NamedTuple

import numpy as np

from moebatch.arrays import Ints
from moebatch.engine.batcher import Slice
from moebatch.engine.sequence import Sequence as TokenSequence
from moebatch.layout.scratch import PROMPT_ROWS
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.predict.predictor import PassTokens
from moebatch.schedule.request import Sweep
from moebatch.schedule.steps.kv import NUM_WINDOWS
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.model.shape import ModelShape
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.view import KvPiece, KvView

MakeMicroBatch = Callable[[Sequence[Span], Mapping[int, Sequence[Span]], Place], MicroBatch]
"""Of spans, the same in layers with sliding windows that have rows of their own, and where it
attends."""


class Part(NamedTuple):
    """New tokens of a sequence: rows of the pass from `start` on."""

    sequence: TokenSequence
    start: int
    num_before: int
    """Tokens of the sequence before them."""
    num_tokens: int

    @property
    def num_afterwards(self) -> int:
        """Tokens of the sequence that are computed then."""
        return self.num_before + self.num_tokens

    def span(self, rows_S: Ints, state_row: int) -> Span:
        """In these rows of a cache, with the row of a state, where there are such."""
        context = len(rows_S) - self.num_tokens
        return Span(
            start=self.start,
            num_tokens=self.num_tokens,
            context=context,
            rows_S=rows_S,
            rope_length=self.sequence.num_prompt_tokens,
            num_skipped=self.num_before - context,
            state_row=state_row,
            num_encoded=self.sequence.request.num_encoded,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A micro-batch of a pass: its rows, its sequences, and where it attends."""

    parts: tuple[Part, ...]
    place: Place
    continues: bool
    """Whether it goes on with the prompt of the one before it."""
    encodes: bool = False
    """Whether it is one of prompts that an encoder takes in."""

    @property
    def rows(self) -> slice:
        """Its rows of the pass."""
        last = self.parts[-1]
        return slice(self.parts[0].start, last.start + last.num_tokens)

    def rows_in(self, shape: ModelShape, layer: int) -> slice:
        """Those of them that go through a layer: none where it is for other tokens."""
        rows = self.rows
        if shape.encodes(layer) == self.encodes:
            return rows
        return slice(rows.start, rows.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All micro-batches of a pass, in the order of their rows."""

    ordered: tuple[Slice, ...]
    groups: tuple[Group, ...]
    ends: tuple[tuple[TokenSequence, int], ...]
    """Sequences whose known tokens are all computed in the pass, with their last rows."""

    @property
    def pass_tokens(self) -> PassTokens:
        """The token of every row, where it comes from, and where sequences begin and end."""
        pieces = (piece.sequence.pending_tokens(piece.num_tokens) for piece in self.ordered)
        tokens_T = np.array(list(chain.from_iterable(pieces)), np.int64)
        is_first_T, is_last_T = np.zeros((2, len(tokens_T)), np.bool_)
        lengths = [piece.num_tokens for piece in self.ordered]
        starts = np.cumsum([0, *lengths[:-1]])
        is_first_T[starts] = True
        is_last_T[[row for _, row in self.ends]] = True
        sequences = [piece.sequence for piece in self.ordered]
        requests = [sequence.request.index for sequence in sequences]
        choices = [sequence.choice for sequence in sequences]
        before = [sequence.num_cached for sequence in sequences]
        return PassTokens(
            tokens_T=tokens_T,
            requests_T=np.repeat(np.array(requests, np.int64), lengths),
            choices_T=np.repeat(np.array(choices, np.int64), lengths),
            positions_T=np.arange(len(tokens_T)) + np.repeat(before - starts, lengths),
            is_first_T=is_first_T,
            is_last_T=is_last_T,
        )

    def sweep(self, compute: LevelName) -> Sweep:
        """The pass, as schedules know it, where everything else is computed at that level."""
        numbered = list(enumerate(self.groups))
        return Sweep(
            num_micro_batches=len(self.groups),
            on_cpu=tuple(group.place != compute for group in self.groups),
            continuing=frozenset(k for k, group in numbered if group.continues),
            encodes=any(group.encodes for group in self.groups),
            tokens=tuple(group.rows.stop - group.rows.start for group in self.groups),
        )

    @property
    def prompts(self) -> list[slice]:
        """Rows of each prompt that an encoder takes in."""
        parts = (part for group in self.groups if group.encodes for part in group.parts)
        return [slice(part.start, part.start + part.num_tokens) for part in parts]

    def rows_in(self, shape: ModelShape, layer: int) -> slice:
        """Rows that go through a layer: prompts that are encoded come last."""
        parts = [group.rows_in(shape, layer) for group in self.groups]
        parts = [rows for rows in parts if rows.start < rows.stop] or [slice(0, 0)]
        return slice(parts[0].start, parts[-1].stop)


def lay_out(
    slices: Sequence[Slice],
    micro_batch_size: int,
    *,
    decode_place: Place,
    prompt_place: Place,
) -> Layout:
    """Micro-batches of decoding sequences, then of prompts.

    Args:
        decode_place: where sequences attend of which one token is computed.
        prompt_place: where all others do.
    """
    arranged = micro_batches(slices, micro_batch_size)
    groups: list[Group] = []
    start = 0
    for pieces in arranged:
        place = decode_place if pieces[0].num_tokens == 1 else prompt_place
        for number, parts in enumerate(_parts(pieces, start)):
            encodes = pieces[0].sequence.is_encoding
            groups.append(Group(parts=parts, place=place, continues=number > 0, encodes=encodes))
            start = groups[-1].rows.stop
    ordered = tuple(piece for pieces in arranged for piece in pieces)
    return Layout(ordered=ordered, groups=tuple(groups), ends=tuple(_ends(ordered)))


def _ends(ordered: Sequence[Slice]) -> Iterator[tuple[TokenSequence, int]]:
    row = -1
    for sequence, num_tokens in ordered:
        row += num_tokens
        if sequence.num_pending == num_tokens:
            yield sequence, row


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionInput:
    """What attention of one micro-batch needs, in layers whose cache lives where it attends and in
    those where it comes into a window."""

    group: Group
    direct: MicroBatch
    windowed: MicroBatch
    view: KvView | None
    window: int


def attention_inputs(layout: Layout, cache: KVCache, make: MakeMicroBatch) -> list[AttentionInput]:
    return [_input(group, k % NUM_WINDOWS, cache, make) for k, group in enumerate(layout.groups)]


def _input(group: Group, window: int, cache: KVCache, make: MakeMicroBatch) -> AttentionInput:
    """Rows and plans cost milliseconds, so there are none for layers that do not exist."""
    is_direct = {cache.is_direct(group.place, layer) for layer in cache.layers}
    direct = windowed = view = None
    if True in is_direct:
        direct = _micro_batch(group, cache, make, partial(_rows, cache))
    if False in is_direct:
        view = _view(group, window, cache)
        windowed = _micro_batch(group, cache, make, partial(_window_rows, view))
    windowed = windowed or direct
    assert windowed is not None, "a model has layers"
    return AttentionInput(
        group=group, direct=direct or windowed, windowed=windowed, view=view, window=window
    )


def _view(group: Group, window: int, cache: KVCache) -> KvView:
    pieces = [KvPiece(part.sequence, part.num_before, part.num_afterwards) for part in group.parts]
    return cache.view(group.place, window, pieces)


def _micro_batch(
    group: Group, cache: KVCache, make: MakeMicroBatch, rows_of: Callable[[int, Part], Ints]
) -> MicroBatch:
    """With the rows that sequences have in groups of layers that lie apart, by their numbers."""
    rows = [
        (cache.groups[number], [rows_of(number, part) for part in group.parts])
        for number in cache.apart
    ]
    states = [0] * len(group.parts)
    for of_cache, of_group in rows:
        if of_cache.is_state:
            states = np.concatenate(of_group).tolist()
    placed: list[Sequence[Span]] = []
    apart: dict[int, Sequence[Span]] = {}
    for of_cache, of_group in rows:
        if of_cache.is_state:
            continue
        in_rows = zip(group.parts, of_group, states, strict=True)
        placed.append([part.span(rows_S, state) for part, rows_S, state in in_rows])
        if of_cache.sink_window is not None:
            apart[of_cache.sink_window.window] = placed[-1]
    return make(placed[0], apart, group.place)


def _rows(cache: KVCache, number: int, part: Part) -> Ints:
    """Where the layers of a group live."""
    return cache.rows(part.sequence, part.num_afterwards, part.num_before, group=number)


def _window_rows(view: KvView, number: int, part: Part) -> Ints:
    """In a window."""
    return view.groups[number].window_rows[part.sequence]


def _parts(slices: Sequence[Slice], start: int) -> Iterator[tuple[Part, ...]]:
    """New tokens of sequences, in rows from `start` on: one long slice is attended piece by
    piece."""
    if len(slices) == 1:
        (piece,) = slices
        for done in range(0, piece.num_tokens, PROMPT_ROWS):
            num_tokens = min(PROMPT_ROWS, piece.num_tokens - done)
            yield (
                Part(piece.sequence, start + done, piece.sequence.num_cached + done, num_tokens),
            )
    else:
        starts = accumulate((piece.num_tokens for piece in slices), initial=start)
        yield tuple(
            Part(piece.sequence, first, piece.sequence.num_cached, piece.num_tokens)
            for piece, first in zip(slices, starts, strict=False)
        )


def micro_batches(slices: Sequence[Slice], size: int) -> list[list[Slice]]:
    """Decoding sequences in micro-batches that have the same work, then slices of prompts.

    They are made anew in every pass, so they stay even while sequences grow and end. A slice of
    more than `PROMPT_ROWS` tokens is alone. Prompts that are encoded come last.
    """
    encoding, decoding, prompts = list[Slice](), list[Slice](), list[Slice]()
    for piece in slices:
        kind = decoding if piece.num_tokens == 1 else prompts
        (encoding if piece.sequence.is_encoding else kind).append(piece)
    return [*balanced(decoding, size), *_prompts(prompts, size), *_prompts(encoding, size)]


def balanced(decoding: Sequence[Slice], size: int) -> list[list[Slice]]:
    """As few micro-batches of at most `size` as possible, with about as many positions each: the
    longest sequence first, into the one that has least (MoE-Lightning, Algorithm 2; what does not
    fit into the cache still waits in the batcher)."""
    groups: list[list[Slice]] = [[] for _ in range(ceil(len(decoding) / size))]
    open_groups = [(0, number) for number in range(len(groups))]
    for piece in sorted(decoding, key=lambda piece: -piece.context):
        positions, least = heapq.heappop(open_groups)
        groups[least].append(piece)
        if len(groups[least]) < size:
            heapq.heappush(open_groups, (positions + piece.context, least))
    return groups


def _prompts(slices: Sequence[Slice], size: int) -> list[list[Slice]]:
    """In their order. One that is longer than `PROMPT_ROWS` is alone, and cut later on."""
    groups: list[list[Slice]] = []
    num_rows = PROMPT_ROWS
    for piece in slices:
        num_rows += piece.num_tokens
        if num_rows > PROMPT_ROWS or len(groups[-1]) >= size:
            groups.append([])
            num_rows = piece.num_tokens
        groups[-1].append(piece)
    return groups
