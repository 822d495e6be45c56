"""Which sequences take part in the next pass, and with how many tokens."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moebatch.engine.sequence import Sequence
from moebatch.plan.admission import longest_first
from moebatch.spec.policy import Policy, pages_of
from moebatch.store.kv import KVCache
from moebatch.store.kv_prefixes import KvPrefix

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

    @property
    def was_decoding(self) -> bool:
        """Once it is computed: whether that was the newest token of an answer."""
        first = self.sequence.num_cached - self.num_tokens
        return self.num_tokens == 1 and first >= self.sequence.num_prompt_tokens


class Batcher:
    """Fills passes: one token of every decoding sequence, then slices of prompts.

    A waiting sequence is admitted when there is a seat and when the cache will probably hold its
    whole answer beside those of all others; with static batching, only when nobody is in work.
    Answers are expected to be as long as nine of ten so far, or as long as they may become until
    some have been seen. When the cache runs full all the same, the sequence that was admitted last
    gives its pages back, and is computed again later from its prompt and what it has generated;
    the oldest one always goes on, so a job cannot stand still.

    What the cache holds of the beginning of a prompt is not computed again. A sequence whose
    beginning another one is about to compute waits for that if it saves enough.
    """

    def __init__(self, waiting: Iterator[Sequence], cache: KVCache, policy: Policy) -> None:
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self.num_shared_tokens = 0
        """Prompt tokens that had been computed for others."""
        is_mixed = policy.batching == "mixed"
        self._source = longest_first(waiting, lambda s: s.length) if is_mixed else waiting
        self._waiting: deque[Sequence] = deque()
        self._cache = cache
        self._policy = policy
        self._spare = 0
        """Pages that nobody will probably need, while sequences are admitted."""
        self._answer_lengths: deque[int] = deque(maxlen=_OBSERVED_ANSWERS)
        self._prefilling: list[Sequence] = []
        """Sequences whose prompts others may wait for."""

    def next_pass(self) -> list[Slice]:
        """Slices of the next pass with pages for their tokens; empty when all work is done."""
        self._publish()
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
        if not sequence.is_dropped:
            self._cache.publish(sequence, sequence.num_cached)
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
        self._cache.publish(sequence, sequence.num_cached)
        self._cache.release(sequence)
        sequence.num_cached = 0
        self._waiting.appendleft(sequence)
        self.num_preempted += 1

    def _admit(self) -> None:
        """Takes waiting sequences in, in their order, with pages for all of their known tokens."""
        if self._policy.batching == "static" and self.running:
            return
        self._spare = self._cache.num_free_pages - sum(map(self._expected_pages, self.running))
        later: deque[Sequence] = deque()
        num_pending_tokens = 0
        most = self._policy.batch_size
        while len(self.running) < most and len(later) < most:
            sequence = self._next_waiting()
            if sequence is None:
                break
            prefix = self._cache.find(sequence.request.prompt_tokens)
            if prefix.num_pending_tokens:
                later.append(sequence)
                num_pending_tokens += prefix.num_pending_tokens
            elif not self._take_in(sequence, prefix):
                self._waiting.appendleft(sequence)
                break
        # To wait until others have computed a beginning costs at most one pass; not to wait, the
        # tokens that are computed several times.
        if num_pending_tokens < self._policy.tokens_per_pass / 2:
            self._take_in_at_once(later)
        self._waiting.extendleft(reversed(later))

    def _take_in_at_once(self, later: deque[Sequence]) -> None:
        """Those of `later` that there is room for, although their beginning is being computed."""
        while later and len(self.running) < self._policy.batch_size:
            if not self._take_in(later[0], self._cache.find(later[0].request.prompt_tokens)):
                return
            later.popleft()

    def _take_in(self, sequence: Sequence, prefix: KvPrefix) -> bool:
        """Admits a sequence, if the cache will probably hold it."""
        wanted = self._expected_pages(sequence) - len(prefix.pages)
        wanted += self._cache.num_unheld(prefix)
        # Alone it can have all pages; whoever feeds us has checked that these suffice.
        if wanted > self._spare and self.running:
            return False
        self._spare -= wanted
        self._cache.begin(
            sequence, sequence.request.prompt_tokens, prefix, tokens=sequence.num_tokens
        )
        sequence.num_cached = prefix.num_tokens
        self.num_shared_tokens += prefix.num_tokens
        self._prefilling.append(sequence)
        self.running.append(sequence)
        return True

    def _publish(self) -> None:
        """Says what the last pass has computed of prompts."""
        for sequence in self._prefilling:
            self._cache.publish(sequence, sequence.num_cached)
        self._prefilling = [
            sequence
            for sequence in self._prefilling
            if sequence.num_cached < sequence.num_prompt_tokens and not sequence.is_dropped
        ]

    def _next_waiting(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting.popleft()
            if not sequence.is_dropped:
                return sequence
        return next((sequence for sequence in self._source if not sequence.is_dropped), None)

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
