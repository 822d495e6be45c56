"""A job pass by pass: what the batcher would do with sequences of these lengths.

Admission, prompt slices and refilled places are those of `engine/batcher.py`, on numbers alone.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from moebatch.layout.admission import longest_first
from moebatch.layout.load import CountedLoad, PassLoad
from moebatch.layout.occupancy import peak_pages, peaks
from moebatch.layout.scratch import PROMPT_ROWS
from moebatch.spec.policy import PAGE_TOKENS, Policy
from moebatch.spec.workload import Length, Workload

Ints = NDArray[np.int64]
NOBODY: Ints = np.empty((0, 4), np.int64)
"""Nothing is in work."""


def job_passes(workload: Workload, policy: Policy, num_sequences: int) -> Iterator[CountedLoad]:
    """Loads of all passes of `num_sequences` sequences, those in which nothing begins or ends
    counted together."""
    return seated(Seats(admission_order(workload.sample, num_sequences, policy), policy))


def admission_order(sample: Sequence[Length], count: int, policy: Policy) -> Ints:
    """So many lengths in the order of their admission, rows of prompt, new and shared tokens: all
    of the sample again and again, or some of it, evenly taken."""
    if len(sample) == 1:
        return np.tile(np.array(sample, dtype=np.int64), (count, 1))
    if count >= len(sample):
        lengths = list(islice(cycle(sample), count))
    else:
        lengths = [sample[index * len(sample) // count] for index in range(count)]
    if policy.batching == "mixed":
        lengths = list(longest_first(lengths, lambda length: length))
    return np.array(lengths, dtype=np.int64)


def load_of(contexts: Ints, tokens: Ints, cached: Ints, *, num_ending: int) -> PassLoad:
    """What a pass has to do.

    Args:
        contexts: positions that each decoding sequence attends to, itself included.
        tokens: of each slice of a prompt.
        cached: positions before each of these slices.
        num_ending: so many of them are the last ones of their prompts.
    """
    pieces = -(-tokens // PROMPT_ROWS)
    earlier = PROMPT_ROWS * pieces * (pieces - 1) // 2
    read_again = np.where(cached > 0, pieces * cached, 0) + earlier
    return PassLoad(
        decode_sequences=float(len(contexts)),
        decode_positions=float(contexts.sum()),
        prompt_tokens=float(tokens.sum()),
        prompt_pairs=float((tokens * cached + tokens * (tokens + 1) // 2).sum()),
        prompt_context=float(read_again.sum()),
        logits_rows=float(len(contexts) + num_ending),
    )


def seated(seats: "Seats") -> Iterator[CountedLoad]:
    """All passes until everybody has ended."""
    while (load := seats.next_pass()) is not None:
        yield load


class Seats:
    """Sequences in work, in the order of their admission, and those that wait."""

    def __init__(self, lengths: Ints, policy: Policy, in_work: Ints = NOBODY) -> None:
        """`lengths` are those of `admission_order`; `in_work` are rows of tokens to compute before
        the next one is chosen, 0 if that is the newest one, of cached and of shared tokens, and of
        new ones that are still to come."""
        self._waiting = lengths
        self._next = 0
        self._policy = policy
        self._prompt_left, self._cached, self._shared, self._new_left = in_work.T.copy()
        self._peaks: Ints | None = None
        """Pages that will be needed by how many are left, once nobody waits and all decode."""

    def next_pass(self) -> CountedLoad | None:
        """Takes everything one pass further, or several if they are alike; None when all is
        done."""
        decodes = self._prompt_left == 0
        budget = self._policy.tokens_per_pass - int(decodes.sum())
        self._admit(budget - int(self._prompt_left.sum()))
        if not len(self._prompt_left):
            return None
        if decodes.all() and len(decodes) == len(self._prompt_left):
            return self._decode_until_one_ends()
        decodes = np.concatenate([decodes, np.zeros(len(self._prompt_left) - len(decodes), bool)])
        before = np.cumsum(self._prompt_left) - self._prompt_left
        slices = np.clip(budget - before, 0, self._prompt_left)
        load = self._load(decodes, slices)
        self._cached += slices + decodes
        self._prompt_left -= slices
        chosen = decodes | ((self._prompt_left == 0) & (slices > 0))
        self._new_left -= chosen
        self._retire()
        return 1, load

    def _decode_until_one_ends(self) -> CountedLoad:
        """Or until somebody can be admitted."""
        count, sequences = self._passes_alike(), len(self._cached)
        load = PassLoad(
            decode_sequences=float(sequences),
            decode_positions=float(self._cached.sum() + sequences * (count + 1) / 2),
            logits_rows=float(sequences),
            spare_pages=float(self._spare_pages()),
        )
        self._cached += count
        self._new_left -= count
        self._retire()
        return count, load

    def _spare_pages(self) -> int:
        """As `Tail` of the engine has them."""
        if self._next < len(self._waiting):
            return 0
        if self._peaks is None:
            self._peaks = peaks(self._cached + 1 - self._shared, self._new_left)
        num_left = len(self._cached)
        needed = int(self._peaks[num_left - 1]) + 1 + num_left // PAGE_TOKENS
        return max(0, self._policy.num_kv_pages - needed)

    def _admit(self, budget: int) -> None:
        """As many as there are seats, tokens in the pass and pages for; the first one always."""
        is_static = self._policy.batching == "static"
        if is_static and len(self._prompt_left):
            return
        room = self._policy.batch_size - len(self._prompt_left)
        if not is_static:
            # All but the last one are computed in this pass.
            prompts, _, shared = self._waiting[self._next : self._next + room].T
            before = np.cumsum(prompts - shared)
            room = min(room, 1 + int(np.searchsorted(before, budget))) if budget > 0 else 0
        fitting = self._num_fitting(min(room, len(self._waiting) - self._next))
        admitted = slice(self._next, self._next + fitting)
        self._next += fitting
        prompts, new, shared = self._waiting[admitted].T
        self._prompt_left = np.concatenate([self._prompt_left, prompts - shared])
        self._new_left = np.concatenate([self._new_left, new])
        self._cached = np.concatenate([self._cached, shared])
        self._shared = np.concatenate([self._shared, shared])

    def _num_fitting(self, most: int) -> int:
        """How many of the next ones the cache will hold until they end; it has always room for
        one that is alone."""
        least = int(most > 0 and not len(self._prompt_left))
        while least < most:
            # Mostly few of them fit, if any.
            tried = least + 1 if least == 0 else min(most, 2 * least)
            if self._fits(tried):
                least = tried
            else:
                most = tried - 1
                break
        while least < most:
            tried = (least + most + 1) // 2
            least, most = (tried, most) if self._fits(tried) else (least, tried - 1)
        return least

    def _fits(self, count: int, passes_later: int = 0) -> bool:
        """Whether so many more would fit, if everybody in work decodes until then."""
        prompts, new, shared = self._waiting[self._next : self._next + count].T
        decoding = self._prompt_left == 0
        grown = self._cached + self._prompt_left - self._shared + decoding + passes_later
        tokens = np.concatenate([grown, prompts - shared])
        left = np.concatenate([self._new_left - passes_later, new])
        return peak_pages(tokens, left) <= self._policy.num_kv_pages

    def _passes_alike(self) -> int:
        """Passes until one ends or the next one fits. The later it begins, the less room it
        takes before others have ended."""
        least, most = 1, int(self._new_left.min())
        is_full = len(self._cached) >= self._policy.batch_size
        if is_full or self._next == len(self._waiting) or self._policy.batching == "static":
            return most
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self._fits(1, middle) else (middle + 1, most)
        return most

    def _retire(self) -> None:
        going_on = self._new_left > 0
        if going_on.all():
            return
        self._prompt_left, self._new_left = self._prompt_left[going_on], self._new_left[going_on]
        self._cached, self._shared = self._cached[going_on], self._shared[going_on]

    def _load(self, decodes: NDArray[np.bool_], slices: Ints) -> PassLoad:
        sliced = slices > 0
        tokens = slices[sliced]
        num_ending = int((self._prompt_left[sliced] == tokens).sum())
        contexts = self._cached[decodes] + 1
        return load_of(contexts, tokens, self._cached[sliced], num_ending=num_ending)
