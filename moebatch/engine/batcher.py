"""Which sequences take part in the next pass, and with how many tokens."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moebatch.engine.sequence import Sequence
from moebatch.spec.policy import Policy, pages_of
from moebatch.store.kv import KVCache

_OBSERVED_ANSWERS = 256
_ENOUGH_ANSWERS = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `num_tokens` tokens of a sequence, all of them in one pass."""

    sequence: Sequence
    num_tokens: int

    @property
    def context(self) -> int:
        """Positions that the slice can see once it is computed."""
        return self.sequence.num_cached + self.num_tokens


class Batcher:
    """Fills passes: one token of every decoding sequence, then slices of prompts.

    A waiting sequence is admitted when there is a seat and when the cache will probably hold its
    whole answer beside those of all others. Answers are expected to be as long
    as nine of ten so far, or as long as they may become until some have been seen. When the cache
    runs full all the same, the sequence that was admitted last gives its pages back, and is
    computed again later from its prompt and what it has generated; the oldest one always goes on,
    so a job cannot stand still.
    """

    def __init__(self, waiting: Iterator[Sequence], cache: KVCache, policy: Policy) -> None:
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self._source = waiting
        self._waiting: deque[Sequence] = deque()
        self._cache = cache
        self._policy = policy
        self._answer_lengths: deque[int] = deque(maxlen=_OBSERVED_ANSWERS)

    def next_pass(self) -> list[Slice]:
        """Slices of the next pass with pages for their tokens; empty when all work is done."""
        slices = [Slice(sequence, 1) for sequence in self._decoding()]
        budget = self._policy.tokens_per_pass - len(slices)
        self._admit()
        for sequence in self.running:
            if sequence.num_pending > 1 or not sequence.output_tokens:
                if budget <= 0:
                    break
                slices.append(Slice(sequence, min(sequence.num_pending, budget)))
                budget -= slices[-1].num_tokens
        return slices

    def shrink(self) -> bool:
        """Makes passes half as large and sends back sequences that have no seat in them any more.

        False if passes are as small as they can be.
        """
        if self._policy.tokens_per_pass == 1:
            return False
        tokens = self._policy.tokens_per_pass // 2
        seats = min(tokens, max(1, self._policy.batch_size // 2))
        self._policy = replace(self._policy, tokens_per_pass=tokens, batch_size=seats)
        while len(self.running) > seats:
            self._preempt(self.running[-1])
        return True

    def retire(self, sequence: Sequence) -> None:
        """Takes a sequence that has ended, or failed, out of work."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._answer_lengths.append(len(sequence.output_tokens))
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._cache.release(sequence)

    def _decoding(self) -> list[Sequence]:
        """Running sequences with one token to compute, after making room for that token."""
        while True:
            decoding = [s for s in self.running if s.output_tokens and s.num_pending == 1]
            missing = sum(self._cache.pages_to_grow(s, s.num_tokens) for s in decoding)
            if missing <= self._cache.num_free_pages:
                break
            self._preempt(self.running[-1])
        for sequence in decoding:
            self._cache.grow(sequence, sequence.num_tokens)
        return decoding

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._cache.release(sequence)
        sequence.num_cached = 0
        self._waiting.appendleft(sequence)
        self.num_preempted += 1

    def _admit(self) -> None:
        """Takes waiting sequences in, oldest first, with pages for all of their known tokens."""
        spare = self._cache.num_free_pages - sum(map(self._expected_pages, self.running))
        while len(self.running) < self._policy.batch_size:
            sequence = self._waiting.popleft() if self._waiting else next(self._source, None)
            if sequence is None:
                return
            spare -= self._expected_pages(sequence)
            # Alone it can have all pages; whoever feeds us has checked that these suffice.
            if spare < 0 and self.running:
                self._waiting.appendleft(sequence)
                return
            self._cache.grow(sequence, sequence.num_tokens)
            self.running.append(sequence)

    def _expected_pages(self, sequence: Sequence) -> int:
        """Pages that the sequence will probably need beside those that it has."""
        return self._cache.pages_to_grow(sequence, self._expected_tokens(sequence))

    def _expected_tokens(self, sequence: Sequence) -> int:
        if len(self._answer_lengths) < _ENOUGH_ANSWERS:
            return sequence.max_tokens
        usual = sorted(self._answer_lengths)[len(self._answer_lengths) * 9 // 10]
        answer = max(usual, len(sequence.output_tokens) + 1)
        return min(sequence.max_tokens, sequence.num_prompt_tokens + answer)


def fits_cache(sequence_tokens: int, num_pages: int) -> bool:
    """Whether a sequence of that length can ever be computed."""
    return pages_of(sequence_tokens) <= num_pages
