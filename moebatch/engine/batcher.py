"""Which sequences take part in the next pass, and with how many tokens."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

from moebatch.engine.progress.endings import InWork
from moebatch.engine.progress.time_left import Standing
from moebatch.engine.sequence import Sequence
from moebatch.layout.admission import Admission, Caps, fields_of, longest_first
from moebatch.spec.policy.policy import PAGE_TOKENS, Policy
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.prefixes import KvPrefix

_OBSERVED_ANSWERS = 256
_ENOUGH_ANSWERS = 16


class Slice(NamedTuple):
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
        return self.num_tokens == 1 and first >= self.sequence.num_before_answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """What is left when no sequence waits any more, if all answers become as long as they may."""

    num_pages: int
    """Pages that suffice to the end."""
    num_passes: int


class Batcher:
    """Fills passes with sequences, by the rules of `Admission`.

    Answers are expected to be as long as nine of ten so far, or as long as they may become until
    some have been seen. When the cache runs full all the same, the sequence that was admitted last
    gives its pages back, and is computed again later from its prompt and what it has generated;
    the oldest one always goes on, so a job cannot stand still.

    What the cache holds of the beginning of a prompt is not computed again. A sequence whose
    beginning another one is about to compute waits for that if it saves enough, unless batches are
    static.
    """

    def __init__(
        self,
        waiting: Iterator[Sequence],
        cache: KVCache,
        policy: Policy,
        *,
        encodes: bool = False,
    ) -> None:
        """`encodes` says that an encoder takes in prompts, each in one pass."""
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self.num_shared_tokens = 0
        """Prompt tokens that had been computed for others."""
        self._num_taken = 0
        is_mixed = policy.batching == "mixed"
        self._source = longest_first(waiting, lambda s: s.length) if is_mixed else waiting
        self._waiting: deque[Sequence] = deque()
        self._cache = cache
        self._policy = policy
        self._encodes = encodes
        self._usual_answer: int | None = None
        self._answer_lengths: deque[int] = deque(maxlen=_OBSERVED_ANSWERS)
        self._prefilling: list[Sequence] = []
        """Sequences whose prompts others may wait for."""

    def next_pass(self) -> list[Slice]:
        """Slices of the next pass with pages for their tokens, those of decoding sequences first;
        empty when all work is done."""
        self._publish()
        self._usual_answer = self._observed()
        while (admission := self._admission(self._expected_left)).lacks_pages:
            self._preempt(self.running[-1])
        for sequence in self.running:
            self._cache.grow(sequence, sequence.num_cached + sequence.num_together)
        self._admit(admission)
        pieces = list(map(Slice, self.running, admission.slices().tolist()))
        prompts = [piece for piece in compress(pieces, ~admission.decodes_S) if piece.num_tokens]
        return [*compress(pieces, admission.decodes_S), *prompts]

    def shrink(self) -> bool:
        """Makes passes half as large and sends back sequences that have no place in them any more.

        False if passes are as small as they can be.
        """
        if self._policy.tokens_per_pass == 1 or self._encodes:
            return False  # a prompt that is encoded needs a pass as large as it was planned
        tokens = self._policy.tokens_per_pass // 2
        most = min(tokens, max(1, self._policy.batch_size // 2))
        self._policy = replace(self._policy, tokens_per_pass=tokens, batch_size=most)
        while len(self.running) > most:
            self._preempt(self.running[-1])
        return True

    def repeat(self, slices: Iterable[Slice]) -> None:
        """After a pass that failed somewhere: its tokens are computed again; where something may
        have been written over that they need, their sequences from the beginning."""
        failed = {piece.sequence for piece in slices}
        for sequence in [one for one in reversed(self.running) if one in failed]:
            if not self._cache.keeps_all:
                self._preempt(sequence)
            elif sequence.num_pending == 0:  # computed, but the next token was not sampled
                sequence.num_cached -= 1

    def rest(self) -> Rest | None:
        """What is still to be done; None if a sequence waits, or not all are past their prompts:
        these would grow later than the others."""
        if not self.running or not all(sequence.is_decoding for sequence in self.running):
            return None
        following = self._next_waiting()
        if following is not None:
            self._waiting.appendleft(following)
            return None
        num_pages = self._admission(_longest_left).pages_to_the_end
        num_passes = max(map(_longest_left, self.running))
        return Rest(num_pages=num_pages + self._cache.first.num_joint, num_passes=num_passes)

    def standing(self, num_passes: int) -> Standing:
        """Where the job stands after so many passes."""
        return Standing(
            num_passes=num_passes,
            in_work=tuple(
                self._in_work(sequence, self._cache.first.num_joint_of(sequence))
                for sequence in self.running
            ),
            waiting_first=tuple(
                self._in_work(sequence, 0)._replace(shared=sequence.num_awaited)
                for sequence in self._waiting
                if not sequence.is_dropped
            ),
            num_taken=self._num_taken,
            batch_size=self._policy.batch_size,
            tokens_per_pass=self._policy.tokens_per_pass,
            num_joint_pages=self._cache.first.num_joint,
        )

    def retire(self, sequence: Sequence) -> None:
        """Takes a sequence that has ended, or failed, out of work."""
        if sequence in self.running:
            self.running.remove(sequence)
        if not sequence.is_dropped:
            self._answer_lengths.append(len(sequence.output_tokens))
            self._cache.first.publish(sequence, sequence.num_cached)
        self._cache.release(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._cache.first.publish(sequence, sequence.num_cached)
        self._cache.release(sequence)
        sequence.num_cached = 0
        self._waiting.appendleft(sequence)
        self.num_preempted += 1

    def _admission(self, left: Callable[[Sequence], int]) -> Admission:
        """The sequences in work as numbers, `left` being the tokens that each will still get."""
        caps = replace(
            Caps.of(self._policy, self._cache.groups[0].most_rows, encodes=self._encodes),
            pages=self._cache.first.num_pages - self._cache.first.num_joint,
        )
        joint = self._cache.first.num_joint_of
        return Admission(caps, fields_of([_row(s, joint(s), left(s)) for s in self.running]))

    def _admit(self, admission: Admission) -> None:
        """Takes waiting sequences in, in their order, with pages for all of their known tokens."""
        if not admission.takes_more:
            return
        later: deque[Sequence] = deque()
        num_pending_tokens = 0
        may_wait = self._policy.batching != "static"  # it would be until all of a batch have ended
        while len(later) < self._policy.batch_size and admission.has_place:
            sequence = self._next_waiting()
            if sequence is None:
                break
            prefix = self._cache.first.find(sequence.request.prompt_tokens)
            if prefix.num_pending_tokens and may_wait:
                sequence.num_awaited = prefix.num_tokens + prefix.num_pending_tokens
                later.append(sequence)
                num_pending_tokens += prefix.num_pending_tokens
            elif not self._take_in(sequence, prefix, admission):
                self._waiting.appendleft(sequence)
                break
        # To wait until others have computed a beginning costs at most one pass; not to wait, the
        # tokens that are computed several times.
        if num_pending_tokens < self._policy.tokens_per_pass / 2:
            self._take_in_at_once(later, admission)
        self._waiting.extendleft(reversed(later))

    def _take_in_at_once(self, later: deque[Sequence], admission: Admission) -> None:
        """Those of `later` that there is room for, although their beginning is being computed."""
        while later:
            prefix = self._cache.first.find(later[0].request.prompt_tokens)
            if not self._take_in(later[0], prefix, admission, begins_now=False):
                return
            later.popleft()

    def _take_in(
        self,
        sequence: Sequence,
        prefix: KvPrefix,
        admission: Admission,
        *,
        begins_now: bool = True,
    ) -> bool:
        """Admits a sequence, if there is room for it."""
        num_joint = len(prefix.pages) - self._cache.first.num_unheld(prefix)
        num_pending = sequence.num_together - prefix.num_tokens
        left = self._expected_left(sequence) + sequence.num_behind
        row = num_pending, prefix.num_tokens, PAGE_TOKENS * num_joint, left
        if not admission.take_in(fields_of([row]), begins_now=begins_now):
            return False
        num_tokens = prefix.num_tokens + num_pending
        self._cache.begin(
            sequence,
            sequence.request.prompt_tokens,
            prefix,
            tokens=num_tokens,
            expected_tokens=num_tokens + left,
        )
        sequence.num_cached = prefix.num_tokens
        self.num_shared_tokens += prefix.num_tokens
        self._prefilling.append(sequence)
        self.running.append(sequence)
        return True

    def _publish(self) -> None:
        """Says what the last pass has computed of prompts."""
        for sequence in self._prefilling:
            self._cache.first.publish(sequence, sequence.num_cached)
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
        for sequence in self._source:
            self._num_taken += 1
            if not sequence.is_dropped:
                return sequence
        return None

    def _in_work(self, sequence: Sequence, num_joint_pages: int) -> InWork:
        pending, cached, shared, _ = _row(sequence, num_joint_pages, 0)
        return InWork(
            pending=pending,
            cached=cached,
            shared=shared,
            generated=len(sequence.output_tokens),
            allowed=sequence.request.sampling.max_tokens,
            begun=sequence.num_begun,
        )

    def _expected_left(self, sequence: Sequence) -> int:
        """Tokens that a sequence will probably still get."""
        sampling, num_so_far = sequence.request.sampling, len(sequence.output_tokens)
        longest = _longest_left(sequence)
        ends_by_itself = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids
        if self._usual_answer is None or not ends_by_itself:
            return longest
        return min(longest, max(self._usual_answer - num_so_far, 1))

    def _observed(self) -> int | None:
        """As long as nine of ten answers so far; None before some have been seen."""
        if len(self._answer_lengths) < _ENOUGH_ANSWERS:
            return None
        return sorted(self._answer_lengths)[len(self._answer_lengths) * 9 // 10]


def _row(sequence: Sequence, num_joint_pages: int, left: int) -> tuple[int, int, int, int]:
    """A sequence in work as admission takes it, which will get so many tokens."""
    # One of thousands in each pass: most decode, and are done with after one look.
    num_cached, num_pending = sequence.num_cached, sequence.num_pending
    shared = min(PAGE_TOKENS * num_joint_pages, num_cached) if num_joint_pages else 0
    if num_pending == 1 and sequence.is_decoding:
        return 0, num_cached, shared, left
    return sequence.num_together, num_cached, shared, left + sequence.num_behind


def _longest_left(sequence: Sequence) -> int:
    """Tokens that a sequence gets at most."""
    return sequence.request.sampling.max_tokens - len(sequence.output_tokens)
