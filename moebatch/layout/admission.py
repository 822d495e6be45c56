"""Which sequences are in a pass, which of their tokens it computes, and which are sent back.

Shape letters: S sequences in work, N sequences that wait, F the four fields of either.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from moebatch.arrays import Bools, Ints
from moebatch.layout.occupancy import Occupancy, PagesAhead
from moebatch.spec.model.cache_layout import LARGEST_SLICE, UNLIMITED
from moebatch.spec.policy.policy import PAGE_TOKENS, Policy
from moebatch.spec.workload import Length

AHEAD_TOKENS = 2**18
"""Prompt tokens that are looked ahead: some 10 MB of them."""

_TRIED_AT_ONCE = 32
"""Sequences that are looked at together: few, since each has a number for every end."""

T = TypeVar("T")


def longest_first(source: Iterable[T], length_of: Callable[[T], Length]) -> Iterator[T]:
    """Hands out the sequence with the longest possible answer among those within sight.

    Passes cost much the same with few sequences as with many, and the longest answer ends last,
    so it should begin first: short ones are kept for the end, where they fill the places that
    become free. (The rule of the longest processing time: Graham 1969.) Sequences with equal
    answers keep their order. More than `AHEAD_TOKENS` prompt tokens are never held, unless one
    sequence has more.
    """
    waiting: list[tuple[int, int, T]] = []
    num_held = 0
    for number, item in enumerate(source):
        length = length_of(item)
        heapq.heappush(waiting, (-length.new_tokens, number, item))
        num_held += length.prompt_tokens
        while num_held > AHEAD_TOKENS:
            taken = heapq.heappop(waiting)[2]
            num_held -= length_of(taken).prompt_tokens
            yield taken
    while waiting:
        yield heapq.heappop(waiting)[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """What bounds a pass."""

    sequences: int
    tokens: int
    pages: int
    """Pages of keys and values that sequences hold alone."""
    is_static: bool
    """Whether sequences are taken in only when none is in work."""
    page_tokens: int = PAGE_TOKENS
    prompt_rows: int = LARGEST_SLICE
    """Tokens of a prompt that attend at once: what is cached before them is read anew for each
    such piece."""
    most_cached: int = UNLIMITED
    """Tokens of a sequence that are cached at once."""
    encodes: bool = False
    """Whether prompts are taken in whole, by an encoder, and answers begin with a token that is
    given: it is the first one that is chosen of a sequence, and to come until then."""

    @property
    def occupancy(self) -> Occupancy:
        """Pages that sequences hold."""
        return Occupancy(self.page_tokens, self.most_cached)

    @classmethod
    def of(cls, policy: Policy, most_cached: int = UNLIMITED, *, encodes: bool = False) -> "Caps":
        """As the policy says, where so much of a sequence is cached at once."""
        return cls(
            sequences=policy.batch_size,
            tokens=policy.tokens_per_pass,
            pages=policy.num_kv_pages,
            is_static=policy.batching == "static",
            most_cached=most_cached,
            encodes=encodes,
        )


def fields_of(rows: Sequence[tuple[int, int, int, int]]) -> Ints:
    """Sequences as `Admission` takes them, [F, S], from one row for each: tokens to compute before
    the next one is chosen (0 where that is the newest one), cached tokens, how many of these other
    sequences hold as well, and new tokens that are still to come."""
    return np.array(rows, np.int64).reshape(-1, 4).T


class Admission:
    """Sequences in work, as numbers, in the order of their admission.

    These are the rules of a run and of its prediction: the engine's batcher describes the sequences
    that it has, and does what is decided; the planner lets the numbers `advance` by themselves.

    - A pass computes one token of every decoding sequence, then slices of prompts, oldest first,
      until it is full; whole prompts, where they are encoded.
    - A waiting sequence is taken in when there is a place, when its prompt can be begun in the
      pass, and when the cache will hold it until it ends beside all others until they do; with
      static batching, only when none is in work. One that is alone is always taken in.
    - When decoding sequences need more pages than there are, the youngest sequence is sent back.
    """

    def __init__(self, caps: Caps, in_work_FS: Ints | None = None) -> None:
        """`in_work_FS` are the `fields_of` sequences in work, if there are any."""
        self._caps, self._occupancy = caps, caps.occupancy
        self._become(fields_of(()) if in_work_FS is None else in_work_FS.copy())
        # A batcher describes its sequences anew in each pass, and asks once.
        self._ahead = PagesAhead(self._occupancy) if in_work_FS is None else None
        """Of as many of the first sequences, all of which decode; None where it is not known."""
        self._num_ahead = 0
        self._peaks_S: Ints | None = None
        """Pages that will be needed by how many are left, while all of them decode."""

    def _become(self, in_work_FS: Ints) -> None:
        """These are in work now. What is asked of them several times a pass is worked out here."""
        self._in_work_FS = in_work_FS
        pending_S, cached_S, shared_S, left_S = in_work_FS
        self._left_S: Ints = left_S
        self.pending_S: Ints = pending_S
        """Tokens to compute before the next one is chosen; 0 for a decoding sequence."""
        self.cached_S: Ints = cached_S
        """Tokens whose keys and values are cached."""
        self.decodes_S: Bools = pending_S == 0
        """Which sequences compute the newest token of their answers."""
        self.num_decoding = int(np.count_nonzero(self.decodes_S))
        self._due_S: Ints = np.maximum(pending_S, 1)
        """Tokens to compute until the next one is chosen, the newest one among them."""
        self._own_tokens_S: Ints = cached_S - shared_S + self._due_S
        """Tokens that are known, without those that other sequences hold as well."""

    def __len__(self) -> int:
        return len(self.pending_S)

    @property
    def lacks_pages(self) -> bool:
        """Whether decoding sequences need more pages in this pass than there are."""
        return len(self) > 1 and self.pages_held() > self._caps.pages

    @property
    def takes_more(self) -> bool:
        """Whether sequences may be taken in before this pass, as far as there is room."""
        return not (self._caps.is_static and len(self))

    @property
    def has_place(self) -> bool:
        """Whether there is a place, and room for the beginning of another prompt in this pass."""
        return len(self) < self._caps.sequences and (self._caps.is_static or self._tokens_left > 0)

    def send_back(self) -> Ints:
        """Takes the youngest sequence out of work; returns it as one that waits, [F, 1]."""
        (pending,), (cached,), (shared,), (left,) = self._in_work_FS[:, -1:]
        self._become(self._in_work_FS[:, :-1])
        self._ahead, self._num_ahead = None, 0
        self._peaks_S = None
        num_tokens = cached + (pending or 1)
        return fields_of([(num_tokens - shared, shared, shared, left)])

    def take_in(self, waiting_FN: Ints, *, begins_now: bool = True) -> int:
        """Takes in as many of the next sequences as there are places, tokens of the pass, and pages
        for; returns how many.

        `begins_now` says that their prompts have to be begun in this pass.
        """
        most: int = min(self._caps.sequences - len(self), waiting_FN.shape[1])
        if most and begins_now and not self._caps.is_static:
            most = min(most, self._num_begun(waiting_FN[:, :most]))
        count = most
        if most and not self._all_fit(waiting_FN[:, :most]):
            count = most if self._fit_until_they_end(waiting_FN[:, :most]) else 0
            count = count or max(self._num_fitting(waiting_FN, most), int(not len(self)))
        if count:
            self._become(np.concatenate([self._in_work_FS, waiting_FN[:, :count]], axis=1))
            self._peaks_S = None
        return count

    def slices(self) -> Ints:
        """Tokens of every sequence in this pass, [S]."""
        if self._tokens_left >= 0:
            return self._due_S
        pending_S, budget = self.pending_S, self._caps.tokens - self.num_decoding
        before_S = pending_S.cumsum() - pending_S
        slices_S: Ints = np.minimum(np.maximum(budget - before_S, 0), pending_S)
        if self._caps.encodes:
            fits_S = slices_S == pending_S
            slices_S = np.where(fits_S, pending_S, 0)
            if not fits_S.any():  # a prompt is larger than a pass, and goes on alone
                slices_S[:1] = pending_S[:1]
        return slices_S + self.decodes_S

    def advance(self, slices_S: Ints, num_passes: int = 1) -> None:
        """Passes of these slices are over, of which all decoding ones may be several: their tokens
        are cached, next ones are chosen, and sequences without any to come have ended."""
        self._left_S -= num_passes * (slices_S >= self._due_S)
        self.cached_S += num_passes * slices_S
        np.maximum(self.pending_S - slices_S, 0, out=self.pending_S)
        goes_on_S = self._left_S > 0
        if self._ahead is not None:
            self._ahead.advance(num_passes)
            self._num_ahead = int(np.count_nonzero(goes_on_S[: self._num_ahead]))
        self._become(self._in_work_FS.take(goes_on_S.nonzero()[0], axis=1))

    def passes_alike(self, waiting_FN: Ints) -> int:
        """Passes, where all sequences decode, until one ends or is sent back or the next waiting
        one fits. The later it begins, the less room it takes before others have ended."""
        most = int(self._left_S.min())
        if len(self) > 1 and self.pages_held(most - 1) > self._caps.pages:
            most = _first(1, most, lambda count: self.pages_held(count) > self._caps.pages)
        may_come = self.takes_more and len(self) < self._caps.sequences
        if not may_come or not waiting_FN.shape[1]:
            return most
        return _first(1, most, lambda count: self._fits(waiting_FN[:, :1], count))

    def pages_held(self, passes_later: int = 0) -> int:
        """Pages of all tokens that are known, if all sequences decode until then."""
        last_S = self._own_tokens_S + (passes_later - 1)
        if self._caps.most_cached < UNLIMITED:
            last_S = np.minimum(last_S, self._caps.most_cached - 1)
        return int((last_S // self._caps.page_tokens).sum()) + len(self)

    @property
    def pages_to_the_end(self) -> int:
        """Most pages that are held from now on if all sequences decode and none comes. They grow by
        a token a pass; should one fall behind, it can still begin a page."""
        if self._peaks_S is None:
            self._peaks_S = self._occupancy.peaks(self._own_tokens_S, self._left_S)
        return int(self._peaks_S[len(self) - 1]) + 1 + len(self) // self._caps.page_tokens

    @property
    def spare_pages(self) -> int:
        """Pages that are not needed any more, if all sequences decode and none comes."""
        return max(0, self._caps.pages - self.pages_to_the_end)

    @property
    def _tokens_left(self) -> int:
        """Tokens of the pass that sequences in work do not take."""
        pending = int(self.pending_S.sum()) if self.num_decoding < len(self) else 0
        return self._caps.tokens - self.num_decoding - pending

    def _num_begun(self, waiting_FN: Ints) -> int:
        """How many of the next sequences would have tokens in this pass."""
        tokens_left = self._tokens_left
        if tokens_left <= 0:
            return 0
        up_to_N = waiting_FN[0].cumsum()
        if self._caps.encodes:
            return max(int(up_to_N.searchsorted(tokens_left, side="right")), not len(self))
        # All but the last one are computed in this pass.
        return 1 + int(up_to_N.searchsorted(tokens_left))

    def _num_fitting(self, waiting_FN: Ints, most: int) -> int:
        """How many of the next sequences the cache will hold until they end."""
        own_N, left_N = _own_and_left(waiting_FN[:, :most])
        one_ends = np.bincount(np.concatenate([self._left_S, left_N])) > 0
        ends_E = one_ends.nonzero()[0][::-1]
        held_E = self._occupancy.at_ends(one_ends, self._own_tokens_S, self._left_S)
        for first in range(0, most, _TRIED_AT_ONCE):
            some = slice(first, min(first + _TRIED_AT_ONCE, most))
            own_N1, left_N1 = own_N[some, None], left_N[some, None]
            is_full_N1 = own_N1 + left_N1 > self._caps.most_cached
            pages_NE = self._occupancy.pages_of(np.where(is_full_N1, UNLIMITED, own_N1 + ends_E))
            held_NE = held_E + np.cumsum(pages_NE * (left_N1 >= ends_E), axis=0)
            fits_N = (held_NE <= self._caps.pages).all(axis=1)
            if not fits_N.all():
                return first + int(fits_N.argmin())
            held_E = held_NE[-1]
        return most

    def _fit_until_they_end(self, waiting_FN: Ints) -> bool:
        """Whether it is quickly seen that the cache will hold all of these beside those in work
        until they end. Where sequences are alike it nearly always does, and what those hold that
        decode is known from the passes before; where they differ it hardly ever does."""
        if self._ahead is None:
            return False
        waiting = _alike(*_own_and_left(waiting_FN))
        if len(waiting) > 1:
            self._ahead = None
            return False
        tokens_S, left_S = self._own_tokens_S, self._left_S
        is_prompt_S, first = self.pending_S[self._num_ahead :] > 0, self._num_ahead
        self._num_ahead += int(is_prompt_S.argmax()) if is_prompt_S.any() else len(is_prompt_S)
        last = self._num_ahead
        self._ahead.add(_alike(tokens_S[first:last], left_S[first:last]))
        others = waiting + _alike(tokens_S[last:], left_S[last:])
        return self._ahead.peak(others) <= self._caps.pages

    def _all_fit(self, waiting_FN: Ints) -> bool:
        """Whether all of what these and those in work need in the end fits at once."""
        own_N, left_N = _own_and_left(waiting_FN)
        in_work = self._occupancy.pages_of(self._own_tokens_S + self._left_S)
        return (
            int(in_work.sum() + self._occupancy.pages_of(own_N + left_N).sum()) <= self._caps.pages
        )

    def _fits(self, waiting_FN: Ints, passes_later: int) -> bool:
        """Whether so many more would fit, if all sequences in work decode until then."""
        own_N, left_N = _own_and_left(waiting_FN)
        tokens = np.concatenate([self._own_tokens_S + passes_later, own_N])
        left = np.concatenate([self._left_S - passes_later, left_N])
        return self._occupancy.peak(tokens, left) <= self._caps.pages


def _alike(tokens: Ints, left: Ints) -> Counter[tuple[int, int]]:
    """How many sequences have so many tokens and will still get so many."""
    return Counter(zip(tokens.tolist(), left.tolist(), strict=True))


def _own_and_left(waiting_FN: Ints) -> tuple[Ints, Ints]:
    """Tokens that are known of sequences that wait, without those that other sequences hold as
    well; and new ones that are still to come."""
    pending_N, cached_N, shared_N, left_N = waiting_FN
    return pending_N + cached_N - shared_N, left_N


def _first(least: int, most: int, holds: Callable[[int], bool]) -> int:
    """The first number of a range from which on something holds; the last one if it never does, as
    mostly."""
    if least == most or not holds(most - 1):
        return most
    most -= 1
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if holds(middle) else (middle + 1, most)
    return least
