"""What attention must know about a pass: whose tokens lie where, and what each of them sees.

Everything here is worked out once per pass and serves all layers.

Shape letters: T tokens of the micro-batch, B decoding sequences, S positions, Q queries of a
block, C head size.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebatch.layout.scratch import bucket_positions
from moebatch.model.delta_plan import DeltaPlan, StateSpan
from moebatch.model.native import loader
from moebatch.model.native.query_slices import QuerySlices
from moebatch.model.native.single_queries import SingleQueries
from moebatch.model.rope import Angles, Rope
from moebatch.model.span import Span
from moebatch.model.stack_plan import StackPlan
from moebatch.spec.attention import Attention
from moebatch.spec.cache_layout import SinkWindow

QUERY_BLOCK = 512
"""Queries of a prompt that are attended at a time where a mask is needed: bounds its size."""
_MAX_PADDING = 0.25
_FEW_TOKENS = 4
"""New tokens of one sequence that the compiled kernel takes one by one: the later ones find most of
what they read in a cache."""
_WIDE = 48
"""Query heads that share a head of keys, from which on the kernel of slices is the faster one for
single tokens as well (Zen 5, one core, latents of 576: 69 and 37 GFLOP/s with 16 heads in bfloat16,
77 and 94 with 128)."""
Expands = Callable[[int, int], bool]
"""As `Attention.expands`: of new tokens and tokens before them."""


class Sight(NamedTuple):
    """What tokens see: the first ones of their sequence and the last ones."""

    window: int | None = None
    """Last ones, itself included; None is all."""
    num_sinks: int = 0
    """First ones, which are met by queries that are turned (see `SinkTurns`)."""

    def num_hidden(self, position: int) -> int:
        """Positions behind the sinks that a token sees no more."""
        hidden = 0 if self.window is None else position - self.window + 1 - self.num_sinks
        return max(0, hidden)

    def rows(self, span: Span) -> Tensor:
        """Cache rows that any token of the span sees, in order of position."""
        hidden, num_sinks = self.num_hidden(span.context), self.num_sinks
        if hidden and num_sinks:
            return torch.cat([span.rows_S[:num_sinks], span.rows_S[num_sinks + hidden :]])
        return span.rows_S[hidden:]

    def num_seen(self, span: Span) -> int:
        """Positions that the first token of the span sees."""
        return span.context + 1 - self.num_hidden(span.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkTurns:
    """Queries that meet sinks are rotated as if they were at the last position that a token sees;
    scores depend on distances only."""

    cos_TR: Tensor
    sin_TR: Tensor
    """Angles, [T, R], from where they are: zero where nothing is left out between."""

    @classmethod
    def of(
        cls,
        positions_T: Tensor,
        lengths_T: Tensor,
        sink_window: SinkWindow,
        rope: Rope,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "SinkTurns":
        """For tokens at these positions of sequences of these lengths."""
        to_T = positions_T.clamp(max=sink_window.num_seen - 1)
        cos_TR, sin_TR, _ = rope.turns(positions_T, to_T, lengths_T, dtype)
        return cls(cos_TR=cos_TR.to(device), sin_TR=sin_TR.to(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """One-token spans of similar length, padded to a common number of positions."""

    tokens_B: Tensor
    """Row of each span's token in the micro-batch."""
    rows_BS: Tensor
    """Cache rows that each of them sees; padding repeats the newest, since rows that no token has
    written may hold NaN, which no mask hides."""
    mask_B11S: Tensor
    """0 where a position counts, -inf where it is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """Several new tokens of one sequence."""

    offset: int
    """Row of the first of them in the micro-batch."""
    num_tokens: int
    context: int
    first_key: int
    """First position behind the sinks, if there are any, that one of them sees."""
    rows: Tensor | slice
    """Cache rows of the sinks, and of all positions from `first_key` on."""

    @property
    def tokens(self) -> slice:
        """Rows of all of them in the micro-batch."""
        return slice(self.offset, self.offset + self.num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandedSlices:
    """Slices whose keys and values are made anew, together."""

    rows: Tensor | slice
    """Cache rows of which they are made."""
    prompts: tuple[PromptSlice, ...]
    """Their rows are counted among those; none where a compiled kernel attends."""
    slices: QuerySlices | None
    """The same for the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """What tokens of a micro-batch see that see as far."""

    sight: Sight
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptSlice, ...]
    band_QS: Tensor | None
    """Additive mask of a block of prompt queries, right-aligned: its last row and its last column
    are the newest position of the block. None where no slice needs one."""
    singles: SingleQueries | None = None
    """Tokens that are left to a compiled kernel, where there is one; they are in no decode group
    and no slice."""
    slices: QuerySlices | None = None
    """Slices that are left to another one; they are not among `prompts`."""
    expanded: tuple[ExpandedSlices, ...] = ()
    """Slices for which more is made of what is cached; they are in none of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The flat rows [start, stop) of a pass, which attention takes at once.

    The angles are where queries and keys are projected, cache rows and plans where the cache is
    and attention is computed; these may be two devices.
    """

    start: int
    stop: int
    angles: Mapping[Attention, Angles]
    """Rotary angles, [T, R], in layers that attend so."""
    new_rows: Mapping[int | None, Tensor]
    """By sliding window: cache row, [T], into which each token's keys and values go."""
    plans: Mapping[int | None, tuple[AttentionPlan, ...]]
    """By sliding window; each token is in one of its plans."""
    as_cached: Mapping[int | None, slice]
    """By sliding window, rows of the micro-batch among which are all tokens that attend to what is
    cached as it is; empty where there are none."""
    turns: SinkTurns | None = None
    """Where tokens meet sinks that are farther away than they see."""
    recurrent: DeltaPlan | None = None
    """Where the model has recurrent layers."""
    stacks: StackPlan | None = None
    """Where the model has an encoder; nothing else is planned then."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.stop - self.start

    @classmethod
    def of_stacks(
        cls, spans: Sequence[Span], device: torch.device, *, gather_rows: int
    ) -> "MicroBatch":
        """The same of a model with an encoder, whose positions do not rotate."""
        plan = StackPlan.of(spans, device, gather_rows)
        start, stop = spans[0].start, spans[-1].start + spans[-1].num_tokens
        return cls(
            start=start,
            stop=stop,
            angles={},
            new_rows={},
            plans={},
            as_cached={},
            stacks=plan,
        )

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        *,
        ropes: Mapping[Attention, Rope],
        windows: Collection[int | None],
        dtype: torch.dtype,
        gather_rows: int,
        apart: Mapping[int, Sequence[Span]] = MappingProxyType({}),
        sink_window: SinkWindow | None = None,
        attention_device: torch.device | None = None,
        recurs: bool = False,
        expands: Expands | None = None,
        num_shared: int = 1,
        in_chunks: bool = False,
    ) -> "MicroBatch":
        """Plans for spans that follow each other without gaps.

        `apart` are the same tokens for layers with a sliding window whose cache has rows of its
        own. `gather_rows` bounds the rows that a decode group gathers, and slices that are expanded
        together, unless one sequence has more. Layers that have the window of `sink_window` see its
        sinks as well. Attention is computed on `attention_device`, that of `ropes` if nothing is
        said. `expands` says for which slices keys and values are made anew, None for none;
        `num_shared` is how many query heads share a head of keys as it is cached. `in_chunks` says
        that windows stand still.
        """
        rope = next(iter(ropes.values()))
        device = rope.device if attention_device is None else attention_device
        start = spans[0].start
        stop = spans[-1].start + spans[-1].num_tokens
        assert stop - start == sum(span.num_tokens for span in spans), "spans must be contiguous"
        positions_T, lengths_T = _positions(spans)
        plans: dict[int | None, tuple[AttentionPlan, ...]] = {}
        new_rows: dict[int | None, Tensor] = {}
        as_cached: dict[int | None, slice] = {}
        turns, is_wide = None, num_shared >= _WIDE
        for window in windows:
            placed = spans if window is None else apart.get(window, spans)
            new = [span.rows_S[span.context :] for span in placed]
            new_rows[window] = torch.cat(new).to(device)
            by_sight: dict[Sight, list[Span]] = {Sight(window): [*placed]}
            if in_chunks and window is not None:
                by_sight = {Sight(): [piece for span in placed for piece in span.in_chunks(window)]}
            elif sink_window is not None and window == sink_window.window:
                by_sight = _by_sight(placed, sink_window)
                if any(sight.num_sinks for sight in by_sight):
                    turns = SinkTurns.of(positions_T, lengths_T, sink_window, rope, dtype, device)
            parts = [
                (sight, *_by_expanding(some, sight, expands)) for sight, some in by_sight.items()
            ]
            plans[window] = tuple(
                _plan(some, expanded, start, sight, dtype, gather_rows, device, is_wide=is_wide)
                for sight, some, expanded in parts
            )
            as_cached[window] = _around([span for _, some, _ in parts for span in some], start)
        return cls(
            start=start,
            stop=stop,
            angles={
                attention: each.angles(positions_T, lengths_T, dtype)
                for attention, each in ropes.items()
            },
            new_rows=new_rows,
            plans=plans,
            as_cached=as_cached,
            turns=turns,
            recurrent=_recurrent(spans, dtype, device) if recurs else None,
        )


def _recurrent(spans: Sequence[Span], dtype: torch.dtype, device: torch.device) -> DeltaPlan:
    return DeltaPlan.of(
        [
            StateSpan(
                start=span.start - spans[0].start,
                num_tokens=span.num_tokens,
                row=span.state_row,
                begins=not span.num_before,
            )
            for span in spans
        ],
        dtype,
        device,
    )


def _positions(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Position of each token in its sequence, and the length of the sequence as it counts there.

    A token counts with the prompt's length even if only a slice of the prompt is there yet, so
    results do not depend on how a prompt is sliced.
    """
    # In numpy: torch would wake all its threads for a few numbers.
    counts = [span.num_tokens for span in spans]
    first_T = np.repeat([span.num_before - span.start for span in spans], counts)
    lengths_T = np.repeat([span.rope_length for span in spans], counts)
    positions_T = np.arange(len(first_T)) + spans[0].start + first_T
    return torch.from_numpy(positions_T), torch.from_numpy(np.maximum(lengths_T, positions_T + 1))


def _by_sight(spans: Sequence[Span], sink_window: SinkWindow) -> dict[Sight, list[Span]]:
    """Those that still see all of their sequences, and others."""
    found: dict[Sight, list[Span]] = {}
    for span in spans:
        is_short = span.num_before + span.num_tokens <= sink_window.num_seen
        sight = Sight() if is_short else Sight(sink_window.window, sink_window.sinks)
        found.setdefault(sight, []).append(span)
    return found


def _by_expanding(
    spans: Sequence[Span], sight: Sight, expands: Expands | None
) -> tuple[list[Span], list[Span]]:
    """Those that attend to what is cached as it is, and those that have more made of it; where
    there are sinks none has, since these are met by queries of their own."""
    if expands is None or sight.num_sinks:
        return [*spans], []
    parts: tuple[list[Span], list[Span]] = [], []
    for span in spans:
        num_before = len(sight.rows(span)) - span.num_tokens
        parts[expands(span.num_tokens, num_before)].append(span)
    return parts


def _around(spans: Sequence[Span], first: int) -> slice:
    """Rows of the micro-batch that begins at `first` from the first to the last of the spans."""
    starts = [span.start - first for span in spans]
    stops = [span.start + span.num_tokens - first for span in spans]
    return slice(min(starts, default=0), max(stops, default=0))


def _plan(
    spans: Sequence[Span],
    expanded: Sequence[Span],
    first: int,
    sight: Sight,
    dtype: torch.dtype,
    gather_rows: int,
    device: torch.device,
    *,
    is_wide: bool,
) -> AttentionPlan:
    """`first` is the row of the pass at which their micro-batch starts."""
    made = tuple(
        _expanded(some, first, sight, dtype, device)
        for some in _batches(_longest_first(expanded), sight, gather_rows)
    )
    singles, slices, others = _by_kernel(spans, dtype, device, is_wide=is_wide)
    decodes = [span for span in others if span.num_tokens == 1]
    prompts = tuple(_prompt(span, first, sight, device) for span in others if span.num_tokens > 1)
    window = sight.window
    each = [*prompts, *(prompt for batch in made for prompt in batch.prompts)]
    keys = [_block_keys(prompt, window) for prompt in each if _needs_band(prompt, window)]
    return AttentionPlan(
        sight=sight,
        decodes=tuple(
            _decode_group(group, first, sight, dtype, device)
            for group in _similar_lengths(decodes, sight, gather_rows)
        ),
        prompts=prompts,
        band_QS=_band(max(keys), window, device, dtype) if keys else None,
        singles=_singles(singles, first, sight),
        slices=_slices(slices, first, sight),
        expanded=made,
    )


def _by_kernel(
    spans: Sequence[Span], dtype: torch.dtype, device: torch.device, *, is_wide: bool
) -> tuple[list[Span], list[Span], list[Span]]:
    """Those of few tokens that are left to a compiled kernel one by one, those that are left to one
    as slices, and the rest, for torch. A slice of one token `is_wide` enough too where many query
    heads share a head of keys."""
    kernels = loader.kernels() if device.type == "cpu" else None
    takes_slices = kernels is not None and kernels.attends_slices(dtype)
    takes_singles = kernels is not None and kernels.attends(dtype)
    few = _FEW_TOKENS if takes_singles and not (takes_slices and is_wide) else 0
    many = [span for span in spans if span.num_tokens > few]
    singles = [span for span in spans if span.num_tokens <= few]
    return (singles, many, []) if takes_slices else (singles, [], many)


def _batches(spans: Sequence[Span], sight: Sight, most_rows: int) -> Iterator[list[Span]]:
    """Slices that see few enough rows together, one at the least."""
    batch: list[Span] = []
    num_rows = 0
    for span in spans:
        seen = len(sight.rows(span))
        if batch and num_rows + seen > most_rows:
            yield batch
            batch, num_rows = [], 0
        batch.append(span)
        num_rows += seen
    if batch:
        yield batch


def _expanded(
    spans: Sequence[Span], first: int, sight: Sight, dtype: torch.dtype, device: torch.device
) -> ExpandedSlices:
    seen = list(map(sight.rows, spans))
    ends = [*accumulate(map(len, seen))]
    places = map(slice, [0, *ends], ends)
    _, by_kernel, _ = _by_kernel(spans, dtype, device, is_wide=True)
    prompts = (
        replace(_prompt(span, first, sight, device), rows=place)
        for span, place in zip(spans, places, strict=True)
    )
    rows_N = torch.cat(seen)
    slices = _slices(by_kernel, first, sight)
    return ExpandedSlices(
        rows=_as_slice(rows_N, device),
        prompts=() if slices else tuple(prompts),
        slices=slices and slices._replace(rows_N=torch.arange(len(rows_N))),
    )


def _singles(spans: Sequence[Span], first: int, sight: Sight) -> SingleQueries | None:
    """All tokens of the spans, longest context first, so that threads finish together."""
    singles = [span for span in spans if span.num_tokens == 1]
    for span in spans:
        if span.num_tokens > 1:
            singles.extend(span.pieces(1))
    if not singles:
        return None
    singles.sort(key=lambda span: -span.context)
    seen = list(map(sight.rows, singles))
    return SingleQueries(
        tokens_B=torch.tensor([span.start - first for span in singles]),
        starts_B=torch.tensor([0, *accumulate(map(len, seen))]),
        rows_N=torch.cat(seen),
    )


def _slices(spans: Sequence[Span], first: int, sight: Sight) -> QuerySlices | None:
    """As they are, those with most to compute first, so that threads finish together."""
    if not spans:
        return None
    spans = _longest_first(spans)
    seen = list(map(sight.rows, spans))
    return QuerySlices(
        tokens_B=torch.tensor([span.start - first for span in spans]),
        counts_B=torch.tensor([span.num_tokens for span in spans]),
        starts_B=torch.tensor([0, *accumulate(map(len, seen))]),
        rows_N=torch.cat(seen),
        num_pairs=sum(span.num_tokens * len(rows) for span, rows in zip(spans, seen, strict=True)),
    )


def _longest_first(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: -span.num_tokens * len(span.rows_S))


def _prompt(span: Span, first: int, sight: Sight, device: torch.device) -> PromptSlice:
    return PromptSlice(
        offset=span.start - first,
        num_tokens=span.num_tokens,
        context=span.context,
        first_key=sight.num_sinks + sight.num_hidden(span.context),
        rows=_as_slice(sight.rows(span), device),
    )


def _needs_band(prompt: PromptSlice, window: int | None) -> bool:
    """Whether plain causal attention over the new tokens would be wrong."""
    return prompt.context > 0 or (window is not None and prompt.num_tokens > window)


def _block_keys(prompt: PromptSlice, window: int | None) -> int:
    """Most positions that a block of queries of the slice looks at together."""
    end = prompt.context + prompt.num_tokens
    if window is None:
        return end
    return min(end, window + min(QUERY_BLOCK, prompt.num_tokens))


def _band(num_keys: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    queries_back = torch.arange(QUERY_BLOCK - 1, -1, -1, device=device)[:, None]
    keys_back = torch.arange(num_keys - 1, -1, -1, device=device)
    hidden = keys_back < queries_back
    if window is not None:
        hidden |= keys_back >= queries_back + window
    zeros = torch.zeros(hidden.shape, device=device, dtype=dtype)
    return zeros.masked_fill_(hidden, -torch.inf)


def _similar_lengths(decodes: Sequence[Span], sight: Sight, gather_rows: int) -> list[list[Span]]:
    """Spans in groups of descending length, with little padding and few enough rows each."""
    groups: list[list[Span]] = []
    for span in sorted(decodes, key=lambda span: -sight.num_seen(span)):
        if groups:
            longest = sight.num_seen(groups[-1][0])
            fits = (len(groups[-1]) + 1) * bucket_positions(longest) <= gather_rows
            if fits and sight.num_seen(span) >= longest * (1 - _MAX_PADDING):
                groups[-1].append(span)
                continue
        groups.append([span])
    return groups


def _decode_group(
    spans: Sequence[Span],
    first: int,
    sight: Sight,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    """Laid out where the rows of the spans are, and then moved: many small steps for a GPU."""
    counts = list(map(sight.num_seen, spans))
    num_positions = bucket_positions(max(counts))
    seen = list(map(sight.rows, spans))
    newest_B = torch.stack([rows_S[-1] for rows_S in seen])
    counts_B = torch.tensor(counts, device=newest_B.device)
    hidden_BS = torch.arange(num_positions, device=newest_B.device) >= counts_B[:, None]
    rows_BS = newest_B[:, None].repeat(1, num_positions)
    rows_BS[~hidden_BS] = torch.cat(seen)
    mask_BS = torch.zeros(hidden_BS.shape, dtype=dtype, device=hidden_BS.device)
    return DecodeGroup(
        tokens_B=torch.tensor([span.start - first for span in spans], device=device),
        rows_BS=rows_BS.to(device),
        mask_B11S=mask_BS.masked_fill_(hidden_BS, -torch.inf).to(device)[:, None, None],
    )


def _as_slice(rows_S: Tensor, device: torch.device) -> Tensor | slice:
    """Rows that follow each other as a slice, so that nothing has to be gathered."""
    first = int(rows_S[0])
    if bool((rows_S.diff() == 1).all()):
        return slice(first, first + len(rows_S))
    return rows_S.to(device)
