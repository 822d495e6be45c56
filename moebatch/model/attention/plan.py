"""What tokens of a micro-batch see that see as far, laid out for torch and for compiled kernels.

Shape letters: B decoding sequences or slices, S positions, N rows that are seen, Q queries of a
block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.model.attention.gathering import Gathered, Seen
from moebatch.model.attention.span import Span, placed
from moebatch.model.native import loader
from moebatch.model.native.attention_work import QuerySlices, SingleQueries
from moebatch.model.native.kernels import Kernels

QUERY_BLOCK = 512
"""Queries of a prompt that are attended at a time where a mask is needed: bounds its size."""
_FEW_TOKENS = 4
"""New tokens of one sequence that the compiled kernel takes one by one: the later ones find most of
what they read in a cache."""


class Sight(NamedTuple):
    """What tokens see: the first ones of their sequence and the last ones."""

    window: int | None = None
    """Last ones, itself included; None is all."""
    num_sinks: int = 0
    """First ones, which are met by queries that are turned (see `MicroBatch.turns`)."""

    def num_hidden(self, position: int) -> int:
        """Positions behind the sinks that a token sees no more."""
        hidden = 0 if self.window is None else position - self.window + 1 - self.num_sinks
        return max(0, hidden)

    def rows(self, span: Span) -> Ints:
        """Cache rows that any token of the span sees, in order of position."""
        hidden, num_sinks = self.num_hidden(span.context), self.num_sinks
        if hidden and num_sinks:
            return np.concatenate([span.rows_S[:num_sinks], span.rows_S[num_sinks + hidden :]])
        return span.rows_S[hidden:]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """One-token spans of similar length."""

    seen: Gathered
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
    decodes: tuple[DecodeGroup, ...] = ()
    prompts: tuple[PromptSlice, ...] = ()
    band_QS: Tensor | None = None
    """Additive mask of a block of prompt queries, right-aligned: its last row and its last column
    are the newest position of the block. None where no slice needs one."""
    singles: SingleQueries | None = None
    """Tokens that are left to a kernel, where there is one; they are in no decode group
    and no slice."""
    slices: QuerySlices | None = None
    """Slices that are left to another one; they are not among `prompts`."""
    expanded: tuple[ExpandedSlices, ...] = ()
    """Slices for which more is made of what is cached; they are in none of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SightPlanner:
    """Plans attention of tokens that see as far."""

    sight: Sight
    first: int
    """Row of the pass at which their micro-batch starts."""
    dtype: torch.dtype
    device: torch.device
    """Where attention is computed."""
    gather_rows: int
    """Most rows that a decode group gathers, and slices that are expanded together, unless one
    sequence has more."""
    takes_tokens: bool
    """A kernel of the GPU attends for single tokens."""
    is_wide: bool
    """Many query heads share a head of keys: the kernel of slices is the faster one for single
    tokens as well."""
    expands: Callable[[int, int], bool] | None
    """Which slices have more made of what is cached, as `Attention.expands` says; None is none."""

    @property
    def _kernels(self) -> Kernels | None:
        return loader.kernels() if self.device.type == "cpu" else None

    @property
    def _takes_slices(self) -> bool:
        return self._kernels is not None and self._kernels.attends_slices(self.dtype)

    def by_expanding(self, spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
        """Those that attend to what is cached as it is, and those that have more made of it; where
        there are sinks none has, since these are met by queries of their own."""
        if self.expands is None or self.sight.num_sinks:
            return [*spans], []
        parts: tuple[list[Span], list[Span]] = [], []
        for span in spans:
            num_new = span.num_tokens
            is_slice = num_new > 1  # a token alone always attends to what is cached
            num_context = len(self.sight.rows(span)) - num_new
            parts[is_slice and self.expands(num_new, num_context)].append(span)
        return parts

    def plan(self, spans: Sequence[Span], expanded: Sequence[Span]) -> AttentionPlan:
        """Of those that attend to what is cached as it is, and of those that have more made of
        it."""
        made = tuple(map(self._expanded, self._batches(_longest_first(expanded))))
        singles, slices, others = self._by_kernel(spans)
        prompts = tuple(self._prompt(span) for span in others if span.num_tokens > 1)
        return AttentionPlan(
            sight=self.sight,
            decodes=tuple(self._decodes([span for span in others if span.num_tokens == 1])),
            prompts=prompts,
            band_QS=self._band([*prompts, *(prompt for batch in made for prompt in batch.prompts)]),
            singles=self._singles(singles),
            slices=self._slices(slices),
            expanded=made,
        )

    def of_rows(
        self,
        tokens: Sequence[slice],
        rows_BS: Tensor,
        counts_B: Ints,
        room_N: Tensor | None = None,
    ) -> AttentionPlan:
        """Of tokens of the micro-batch, one after the other, that each see the first `counts_B` of
        some rows; these are where attention is computed, and so is the plan. Where they may see
        fewer than all, `room_N` has room for what they see, one after the other."""
        places = [torch.arange(each.start, each.stop, device=self.device) for each in tokens]
        tokens_B, (num_tokens, num_seen) = torch.cat(places), rows_BS.shape
        back_BS = torch.arange(num_seen - 1, -1, -1, device=self.device).expand(rows_BS.shape)
        starts_B = torch.arange(num_tokens + 1, device=self.device) * num_seen
        rows_N = rows_BS.flatten()
        if room_N is not None:
            hidden_B1 = torch.from_numpy(num_seen - counts_B).to(self.device)[:, None]
            back_BS = (back_BS - hidden_B1).clamp_(min=-1)
            starts = np.concatenate([[0], np.cumsum(counts_B)])
            starts_B, room_N = torch.from_numpy(starts).to(self.device), room_N[: starts[-1]]
            rows_N = torch.masked_select(rows_BS, back_BS >= 0, out=room_N)
        if self._most_single:
            singles = SingleQueries(tokens_B, starts_B, rows_N)
            return AttentionPlan(sight=self.sight, singles=singles)
        if self._takes_slices:
            ones_B, num_pairs = torch.ones_like(tokens_B), len(rows_N)
            slices = QuerySlices(tokens_B, ones_B, starts_B, rows_N, num_pairs)
            return AttentionPlan(sight=self.sight, slices=slices)
        at_once, decodes = max(1, self.gather_rows // num_seen), list[DecodeGroup]()
        parts = (torch.split(each, at_once) for each in (tokens_B, rows_BS, back_BS))
        for some_B, some_BS, behind_BS in zip(*parts, strict=True):
            seen = Gathered(tokens_B=some_B, rows_BS=some_BS, back_BS=behind_BS)
            decodes.append(DecodeGroup(seen=seen, mask_B11S=seen.mask_B11S(self.dtype)))
        return AttentionPlan(sight=self.sight, decodes=tuple(decodes))

    @property
    def _most_single(self) -> int:
        """New tokens of a sequence that are left to a kernel one by one, if there are no more."""
        if self.takes_tokens:
            return 1
        kernels = self._kernels
        takes_singles = kernels is not None and kernels.attends(self.dtype)
        return _FEW_TOKENS if takes_singles and not (self._takes_slices and self.is_wide) else 0

    def _by_kernel(self, spans: Sequence[Span]) -> tuple[list[Span], list[Span], list[Span]]:
        """Those of few tokens that are left to a kernel one by one, those that are left to one as
        slices, and the rest, for torch."""
        few = self._most_single
        many = [span for span in spans if span.num_tokens > few]
        singles = [span for span in spans if span.num_tokens <= few]
        return (singles, many, []) if self._takes_slices else (singles, [], many)

    def _batches(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Slices that see few enough rows together, one at the least."""
        batch: list[Span] = []
        num_rows = 0
        for span in spans:
            seen = len(self.sight.rows(span))
            if batch and num_rows + seen > self.gather_rows:
                yield batch
                batch, num_rows = [], 0
            batch.append(span)
            num_rows += seen
        if batch:
            yield batch

    def _expanded(self, spans: Sequence[Span]) -> ExpandedSlices:
        seen = list(map(self.sight.rows, spans))
        ends = [*accumulate(map(len, seen))]
        places = map(slice, [0, *ends], ends)
        prompts = (
            replace(self._prompt(span), rows=place)
            for span, place in zip(spans, places, strict=True)
        )
        rows_N = np.concatenate(seen)
        slices = self._slices(spans) if self._takes_slices else None
        return ExpandedSlices(
            rows=self._as_slice(rows_N),
            prompts=() if slices else tuple(prompts),
            slices=slices and slices._replace(rows_N=torch.arange(len(rows_N))),
        )

    def _singles(self, spans: Sequence[Span]) -> SingleQueries | None:
        """All tokens of the spans, longest context first, so that threads finish together."""
        singles = [span for span in spans if span.num_tokens == 1]
        for span in spans:
            if span.num_tokens > 1:
                singles.extend(span.pieces(1))
        if not singles:
            return None
        singles.sort(key=lambda span: -span.context)
        return SingleQueries(**self._laid_out(singles))

    def _slices(self, spans: Sequence[Span]) -> QuerySlices | None:
        """As they are, those with most to compute first, so that threads finish together."""
        if not spans:
            return None
        spans = _longest_first(spans)
        counts_B, seen = torch.tensor([span.num_tokens for span in spans]), self._laid_out(spans)
        num_pairs = int(counts_B @ seen["starts_B"].diff())
        window = self.sight.window
        return QuerySlices(counts_B=counts_B, num_pairs=num_pairs, window=window, **seen)

    def _laid_out(self, spans: Sequence[Span]) -> dict[str, Tensor]:
        """Where their tokens begin, and the rows that they see, one after the other."""
        seen = list(map(self.sight.rows, spans))
        return {
            "tokens_B": torch.tensor([span.start - self.first for span in spans]).to(self.device),
            "starts_B": torch.tensor([0, *accumulate(map(len, seen))]).to(self.device),
            "rows_N": placed(seen, self.device),
        }

    def _decodes(self, spans: Sequence[Span]) -> Iterator[DecodeGroup]:
        seen = [Seen(span.start - self.first, self.sight.rows(span)) for span in spans]
        for group in Gathered.all_of(seen, self.gather_rows):
            mask_B11S = group.mask_B11S(self.dtype).to(self.device)
            yield DecodeGroup(seen=group.to(self.device), mask_B11S=mask_B11S)

    def _prompt(self, span: Span) -> PromptSlice:
        return PromptSlice(
            offset=span.start - self.first,
            num_tokens=span.num_tokens,
            context=span.context,
            first_key=self.sight.num_sinks + self.sight.num_hidden(span.context),
            rows=self._as_slice(self.sight.rows(span)),
        )

    def _as_slice(self, rows_S: Ints) -> Tensor | slice:
        """Rows that follow each other as a slice, so that nothing has to be gathered."""
        first = int(rows_S[0])
        if bool((np.diff(rows_S) == 1).all()):
            return slice(first, first + len(rows_S))
        return placed([rows_S], self.device)

    def _band(self, prompts: Sequence[PromptSlice]) -> Tensor | None:
        """The mask that serves all of them, if one needs any."""
        window = self.sight.window
        keys = [_block_keys(prompt, window) for prompt in prompts if _needs_band(prompt, window)]
        if not keys:
            return None
        queries_back = torch.arange(QUERY_BLOCK - 1, -1, -1, device=self.device)[:, None]
        keys_back = torch.arange(max(keys) - 1, -1, -1, device=self.device)
        hidden = keys_back < queries_back
        if window is not None:
            hidden |= keys_back >= queries_back + window
        zeros = torch.zeros(hidden.shape, device=self.device, dtype=self.dtype)
        return zeros.masked_fill_(hidden, -torch.inf)


def _longest_first(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: -span.num_tokens * len(span.rows_S))


def _needs_band(prompt: PromptSlice, window: int | None) -> bool:
    """Whether plain causal attention over the new tokens would be wrong."""
    return prompt.context > 0 or (window is not None and prompt.num_tokens > window)


def _block_keys(prompt: PromptSlice, window: int | None) -> int:
    """Most positions that a block of queries of the slice looks at together."""
    end = prompt.context + prompt.num_tokens
    if window is None:
        return end
    return min(end, window + min(QUERY_BLOCK, prompt.num_tokens))
