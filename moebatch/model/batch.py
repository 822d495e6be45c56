"""What attention must know about a pass: whose tokens lie where, and what each of them sees.

Everything here is worked out once per pass and serves all layers.

Shape letters: T tokens of the micro-batch, R pairs of a head that rotate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.model.attention.plan import AttentionPlan, Sight, SightPlanner
from moebatch.model.attention.span import Span, new_rows, placed
from moebatch.model.attention.stack_plan import StackPlan
from moebatch.model.gpu.loader import attends_single
from moebatch.model.recurrence.plan import RecurrentPlan, StateSpan
from moebatch.model.rope import Angles, Rope
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.shape import ModelShape

_WIDE = 48
"""Query heads that share a head of keys, from which on the kernel of slices is the faster one for
single tokens as well (Zen 5, one core, latents of 576: 69 and 37 GFLOP/s with 16 heads in bfloat16,
77 and 94 with 128)."""


class Chooser(NamedTuple):
    """Tokens of a sequence that each choose some of more that lie before them."""

    tokens: slice
    """Their rows in the micro-batch."""
    num_before: int
    """Tokens of the sequence before them."""
    counts_Q: Ints
    """Positions that each of them attends to."""
    rows_BS: Tensor
    """Cache rows of all positions up to the last one's, where attention is computed, block by
    block; behind the last position its row once more."""

    @property
    def num_seen(self) -> int:
        """Positions up to the last one's."""
        num_tokens: int = self.tokens.stop - self.tokens.start
        return self.num_before + num_tokens

    @property
    def rows_S(self) -> Tensor:
        """Their cache rows."""
        return self.rows_BS.view(-1)[: self.num_seen]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """Attention of a micro-batch in layers that have the same sliding window."""

    new_rows_T: Tensor
    """Cache row into which each token's keys and values go."""
    spans: Sequence[Span]
    """Of the micro-batch, with the rows that layers have there."""
    plans: tuple[AttentionPlan, ...]
    """Each token is in one of them."""
    as_cached: slice
    """Rows of the micro-batch among which are all tokens that attend to what is cached as it is;
    empty where there are none."""
    choosing: tuple[Chooser, ...]
    """Tokens that are in none of the plans, since they choose what they attend to."""
    planner: SightPlanner
    """Plans what they have chosen."""

    def chosen(self, choices_TK: Tensor, rooms_XTS: Tensor) -> AttentionPlan:
        """What tokens see that choose, by numbers of blocks in their sequences, in ascending
        order. Cache rows of these are in `rooms_XTS` then; one room is enough for blocks of one
        token, and others take two."""
        rows_TS, end = rooms_XTS[0], 0
        for chooser in self.choosing:
            own, size = chooser.tokens, chooser.rows_BS.shape[1]
            start, end = end, end + own.stop - own.start
            of_tokens, room = choices_TK[own].flatten(), rows_TS[start:end].view(-1, size)
            torch.index_select(chooser.rows_BS, 0, of_tokens, out=room)
        tokens = [chooser.tokens for chooser in self.choosing]
        counts_T = np.concatenate([chooser.counts_Q for chooser in self.choosing])
        room_N = None if len(rooms_XTS) == 1 else rooms_XTS[1].view(-1)
        return self.planner.of_rows(tokens, rows_TS[:end], counts_T, room_N)

    @property
    def meets_sinks(self) -> bool:
        """Whether some tokens see sinks that are farther away than their window."""
        return any(plan.sight.num_sinks for plan in self.plans)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The flat rows [start, stop) of a pass, which attention takes at once.

    The angles are where queries and keys are projected, cache rows and plans where the cache is
    and attention is computed; these may be two devices.
    """

    start: int
    stop: int
    angles: Sequence[Angles] = ()
    """By layer, rotary ones, [T, R]."""
    by_window: Mapping[int | None, WindowPlan] = field(default_factory=dict)
    """By the sliding window of layers; None is that of layers without one."""
    choosing: WindowPlan | None = None
    """That of layers whose tokens choose what they attend to, which have none."""
    turns: Angles | None = None
    """Where tokens meet sinks that are farther away than they see: queries that do are rotated from
    where they are as if they were at the last position that a token sees; scores depend on
    distances only."""
    recurrent: RecurrentPlan | None = None
    """Where the model has recurrent layers."""
    stacks: StackPlan | None = None
    """Where the model has an encoder; nothing else is planned then."""

    @property
    def rows(self) -> slice:
        """Of the pass."""
        return slice(self.start, self.stop)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class BatchPlanner:
    """Plans the micro-batches of a model."""

    def __init__(
        self,
        shape: ModelShape,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        gather_rows: int,
        growth_R: Tensor | None = None,
    ) -> None:
        """`config` is the raw config.json; `device` that of projections. `gather_rows` bounds the
        rows that are gathered at once, as a `SightPlanner` says, and by `growth_R` frequencies have
        grown, as a `Rope` says.

        Raises CheckpointError for rotary parameters that are not known.
        """
        self._shape = shape
        self._dtype, self._device, self._gather_rows = dtype, device, gather_rows
        self._windows: dict[int | None, Attention] = {}
        for layer, window in enumerate(shape.sliding_windows):
            if (attention := shape.attention_of(layer)).most_chosen is None:
                self._windows.setdefault(window, attention)
        self._most_chosen = shape.attention.most_chosen or 0
        self._ropes = [] if shape.encoder else Rope.by_layer(shape, config, device, growth_R)

    def plan(
        self,
        spans: Sequence[Span],
        *,
        apart: Mapping[int, Sequence[Span]] = MappingProxyType({}),
        attention_device: torch.device | None = None,
    ) -> MicroBatch:
        """For spans that follow each other without gaps; it serves all layers.

        `apart` are the same tokens for layers with a sliding window whose cache has rows of its
        own. `attention_device` is that of the `AttentionCore`, if it is not the decoder's own.
        """
        start, stop = spans[0].start, spans[-1].start + spans[-1].num_tokens
        assert stop - start == sum(span.num_tokens for span in spans), "spans must be contiguous"
        if self._shape.encoder is not None:
            stacks = StackPlan.of(spans, self._device, self._gather_rows)
            return MicroBatch(start=start, stop=stop, stacks=stacks)
        device = self._device if attention_device is None else attention_device
        by_window = {
            window: self._planned(
                spans if window is None else apart.get(window, spans),
                self._sight_planner(start, attention, attention_device),
                window,
            )
            for window, attention in self._windows.items()
        }
        choosing = None
        if self._most_chosen:
            planner = self._sight_planner(start, self._shape.attention, attention_device)
            choosing = self._planned(spans, planner, most_chosen=self._most_chosen)
        positions_T, lengths_T = _positions(spans)
        angles = {r: r.angles(positions_T, lengths_T, self._dtype) for r in {*self._ropes}}
        meets_sinks = any(plan.meets_sinks for plan in by_window.values())
        return MicroBatch(
            start=start,
            stop=stop,
            angles=[angles[rope] for rope in self._ropes],
            by_window=by_window,
            choosing=choosing,
            turns=self._turns(positions_T, lengths_T, device) if meets_sinks else None,
            recurrent=self._recurrent(spans, device) if self._shape.recurrence else None,
        )

    def _sight_planner(
        self, first: int, attention: Attention, attention_device: torch.device | None
    ) -> SightPlanner:
        """For tokens that see all before them, of the micro-batch that begins there, in layers that
        attend so."""
        device = self._device if attention_device is None else attention_device
        return SightPlanner(
            sight=Sight(),
            first=first,
            dtype=self._dtype,
            device=device,
            gather_rows=self._gather_rows,
            takes_tokens=attends_single(self._shape, device),
            is_wide=attention.num_shared >= _WIDE,
            # Elsewhere there are no weights to make more of what is cached.
            expands=attention.expands if attention_device is None else None,
        )

    def _planned(
        self,
        spans: Sequence[Span],
        planner: SightPlanner,
        window: int | None = None,
        *,
        most_chosen: int | None = None,
    ) -> WindowPlan:
        """For layers with that window, with rows that they have of the spans, or whose tokens
        choose so many; `planner` is that of tokens that see all before them."""
        planned, choosing = spans, list[Span]()
        if most_chosen is not None:
            planned, choosing = _by_choosing(spans, most_chosen)
        plans, as_cached = list[AttentionPlan](), [*choosing]
        for sight, some in self._by_sight(planned, window).items():
            of_sight = replace(planner, sight=sight)
            plain, expanded = of_sight.by_expanding(some)
            plans.append(of_sight.plan(plain, expanded))
            as_cached += plain
        return WindowPlan(
            new_rows_T=new_rows(spans, planner.device),
            spans=tuple(spans),
            plans=tuple(plans),
            as_cached=_around([span.tokens_from(planner.first) for span in as_cached]),
            choosing=tuple(self._chooser(span, planner) for span in choosing),
            planner=planner,
        )

    def _chooser(self, span: Span, planner: SightPlanner) -> Chooser:
        num_seen_Q = np.arange(1, span.num_tokens + 1) + span.num_before
        selector = self._shape.attention.selector
        assert selector is not None, "tokens choose by one"
        return Chooser(
            tokens=span.tokens_from(planner.first),
            num_before=span.num_before,
            counts_Q=selector.num_chosen(num_seen_Q),
            rows_BS=_in_blocks(span.rows_S, selector.together, planner.device),
        )

    def _by_sight(self, spans: Sequence[Span], window: int | None) -> dict[Sight, list[Span]]:
        """Those of a layer that has the window: where sinks are kept, those that still see all of
        their sequences, and others."""
        sink_window = self._shape.attention.sink_window
        if self._shape.windows_are_chunks and window is not None:
            return {Sight(): [piece for span in spans for piece in span.in_chunks(window)]}
        if sink_window is None or window != sink_window.window:
            return {Sight(window): [*spans]}
        found: dict[Sight, list[Span]] = {}
        for span in spans:
            is_short = span.num_before + span.num_tokens <= sink_window.num_seen
            sight = Sight() if is_short else Sight(sink_window.window, sink_window.sinks)
            found.setdefault(sight, []).append(span)
        return found

    def _turns(self, positions_T: Tensor, lengths_T: Tensor, device: torch.device) -> Angles:
        attention = self._shape.attention
        assert attention.sink_window is not None, "there are sinks"
        to_T = positions_T.clamp(max=attention.sink_window.num_seen - 1)
        turns = self._ropes[0].turns(positions_T, to_T, lengths_T, self._dtype)
        return Angles(turns.cos_TR.to(device), turns.sin_TR.to(device))

    def _recurrent(self, spans: Sequence[Span], device: torch.device) -> RecurrentPlan:
        recurrence = self._shape.recurrence
        assert recurrence is not None, "layers are recurrent by one"
        states = [
            StateSpan(
                start=span.start - spans[0].start,
                num_tokens=span.num_tokens,
                row=span.state_row,
                num_before=span.num_before,
            )
            for span in spans
        ]
        return RecurrentPlan.of(states, recurrence, self._dtype, device)


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


def _in_blocks(rows_S: Ints, size: int, device: torch.device) -> Tensor:
    """Blocks of so many rows, one of them behind all that are full; the last row once more where
    there are none for it."""
    return placed([np.pad(rows_S, (0, size - len(rows_S) % size), "edge")], device).view(-1, size)


def _by_choosing(spans: Sequence[Span], most: int) -> tuple[list[Span], list[Span]]:
    """Tokens that attend to all they see, and those that see more than they may choose."""
    parts = [span.split(most - span.context) for span in spans]
    return [all_ for all_, _ in parts if all_], [some for _, some in parts if some]


def _around(rows: Sequence[slice]) -> slice:
    """From the first to the last of some rows."""
    start = min((some.start for some in rows), default=0)
    return slice(start, max((some.stop for some in rows), default=0))
