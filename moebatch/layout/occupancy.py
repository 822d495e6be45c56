"""Pages of keys and values that sequences hold until they end."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from moebatch.arrays import Bools, Ints
from moebatch.once import once
from moebatch.spec.model.cache_layout import UNLIMITED
from moebatch.spec.policy.policy import PAGE_TOKENS


class Occupancy(NamedTuple):
    """Pages of sequences, all of which grow by one token a pass. One that will have more than
    `most_cached` tokens counts as if it had these from the beginning.

    What `tokens` sequences have now is at least 1, and `left` how many each will still get.
    """

    page_tokens: int = PAGE_TOKENS
    most_cached: int = UNLIMITED

    def pages_of(self, tokens: Ints) -> Ints:
        """Those of sequences of so many tokens."""
        last: Ints = np.minimum(tokens, self.most_cached) - 1
        return last // self.page_tokens + 1

    def peak(self, tokens: Sequence[int] | Ints, left: Sequence[int] | Ints) -> int:
        """Most pages that are held at any time.

        Less than the sum of what each sequence needs in the end, since they do not end together:
        one that ends gives its pages to those that are still growing.
        """
        tokens, left = np.asarray(tokens, np.int64), np.asarray(left, np.int64)
        return int(self.at_ends(np.bincount(left) > 0, tokens, left).max(initial=0))

    def peaks(self, tokens: Ints, left: Ints) -> Ints:
        """Most of them from when on only the k longest of the sequences are left, for k = 1, 2, and
        so on; those that end together count together."""
        num_ending = np.bincount(left)
        held_E = self.at_ends(num_ending > 0, tokens, left)
        return np.maximum.accumulate(held_E).repeat(num_ending[num_ending > 0][::-1])

    def at_ends(self, one_ends: Bools, tokens: Ints, left: Ints) -> Ints:
        """Pages that are held at each number of passes with which `one_ends`, the last first. All
        ends of the sequences are among these: in between, what is held only grows. None is sorted:
        this is called thousands of times."""
        size = self.page_tokens
        passes = one_ends.nonzero()[0][::-1]
        group = one_ends[::-1].cumsum()[::-1][left] - 1
        full, over = np.divmod(tokens - 1, size)
        growing = group * size + over
        if self.most_cached < UNLIMITED:
            grows = tokens + left <= self.most_cached
            full = np.where(grows, full, (self.most_cached - 1) // size + 1)
            growing = growing[grows]
        by_over = np.bincount(growing, minlength=len(passes) * size)
        alive_by_over = by_over.reshape(-1, size).cumsum(axis=0)
        at_least = alive_by_over[:, ::-1].cumsum(axis=1)
        whole, rest = np.divmod(passes, size)
        one_more = (rest > 0) * at_least[np.arange(len(passes)), rest - 1]
        full_pages = np.bincount(group, weights=full, minlength=len(passes)).cumsum()
        held_E: Ints = full_pages.astype(np.int64) + at_least[:, -1] * (whole + 1) + one_more
        return held_E


class PagesAhead:
    """Pages that sequences will hold in each pass to come until they end: while all of them decode,
    passes change nothing of that but where it begins.

    Sequences are counted by their tokens and by what each will still get. Shape letters: T passes
    to come.
    """

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self._held_T: Ints = np.zeros(0, np.int64)
        self._known: dict[tuple[int, int], Ints] = {}

    def advance(self, num_passes: int) -> None:
        """So many passes are over."""
        self._held_T = self._held_T[num_passes:]

    def add(self, sequences: Mapping[tuple[int, int], int]) -> None:
        """These decode from now on, beside the others."""
        if sequences:
            self._held_T = self._held_with(sequences)

    def peak(self, others: Mapping[tuple[int, int], int]) -> int:
        """Most pages that are held at any time, if others decode as well."""
        return int(self._held_with(others).max(initial=0))

    def _held_with(self, others: Mapping[tuple[int, int], int]) -> Ints:
        longest = max([len(self._held_T), *(left for _, left in others)])
        held_T = np.zeros(longest, np.int64)
        held_T[: len(self._held_T)] = self._held_T
        for alike, count in others.items():
            held_T[: alike[1]] += count * once(self._known, alike, partial(self._pages, *alike))
        return held_T

    def _pages(self, tokens: int, left: int) -> Ints:
        """Those of one sequence in each pass."""
        is_full = tokens + left > self._occupancy.most_cached
        tokens_T = np.arange(tokens + 1, tokens + left + 1)
        return self._occupancy.pages_of(np.full(left, UNLIMITED) if is_full else tokens_T)
