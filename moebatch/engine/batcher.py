"""Which sequences take part in the next pass, and with how many tokens."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from moebatch.engine.sequence import Sequence
from moebatch.layout.admission import longest_first
from moebatch.layout.occupancy import peak_pages
from moebatch.plan.endings import InWork
from moebatch.plan.time_left import Standing
from moebatch.spec.policy import PAGE_TOKENS, Policy, pages_of
from moebatch.store.kv import KVCache
from moebatch.store.kv_prefixes import KvPrefix

_OBSERVED_ANSWERS = 256
_ENOUGH_ANSWERS = 16
_ANY_BUDGET = 2**62


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """What is left when nobody waits any more, if all answers become as long as they may."""

    num_pages: int
    """Most pages that will be held at once."""
    num_passes: int


class Batcher:
    """Fills passes: one token of every decoding sequence, then slices of prompts.

    A waiting sequence is admitted when there is a seat, when its prompt can be begun in the pass,
    and when the cache will probably hold it until it ends, beside all others until they do; with
    static batching, only when nobody is in work.
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
        self._num_taken = 0
        is_mixed = policy.batching == "mixed"
        self._source = longest_first(waiting, lambda s: s.length) if is_mixed else waiting
        self._waiting: deque[Sequence] = deque()
        self._cache = cache
        self._policy = policy
        self._usual_answer: int | None = None
        self._answer_lengths: deque[int] = deque(maxlen=_OBSERVED_ANSWERS)
        self._prefilling: list[Sequence] = []
        """Sequences whose prompts others may wait for."""

    def next_pass(self) -> list[Slice]:
        """Slices of the next pass with pages for their tokens; empty when all work is done."""
        self._publish()
        slices = [Slice(sequence, 1) for sequence in self._decoding()]
        budget = self._policy.tokens_per_pass - len(slices)
        self._admit(budget - sum(s.num_pending for s in self.running if not s.is_decoding))
        for sequence in self.running:
            if not sequence.is_decoding:
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

    def rest(self) -> Rest | None:
        """What is still to be done; None if anybody waits, or not all are past their prompts: these
        would grow later than the others."""
        if not self.running or not all(sequence.is_decoding for sequence in self.running):
            return None
        following = self._next_waiting()
        if following is not None:
            self._waiting.appendleft(following)
            return None
        room = self._room(_longest_left)
        num_passes = max(map(_longest_left, self.running))
        return Rest(num_pages=room.peak + self._cache.num_pages_held_jointly, num_passes=num_passes)

    def standing(self, num_passes: int) -> Standing:
        """Where the job stands after so many passes."""
        return Standing(
            num_passes=num_passes,
            in_work=tuple(
                self._in_work(sequence, self._cache.num_joint_pages(sequence))
                for sequence in self.running
            ),
            returned=tuple(self._in_work(s, 0) for s in self._waiting if not s.is_dropped),
            num_taken=self._num_taken,
            batch_size=self._policy.batch_size,
            tokens_per_pass=self._policy.tokens_per_pass,
            num_joint_pages=self._cache.num_pages_held_jointly,
        )

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
            decoding = [s for s in self.running if s.is_decoding]
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

    def _admit(self, budget: int) -> None:
        """Takes waiting sequences in, in their order, with pages for all of their known tokens.

        No more of them than there is `budget` to compute in this pass, so that they hold pages no
        longer than they must; but static batches are taken in whole.
        """
        if self._policy.batching == "static":
            if self.running:
                return
            budget = _ANY_BUDGET
        self._usual_answer = self._observed()
        room = self._room(self._expected_left)
        later: deque[Sequence] = deque()
        num_pending_tokens = 0
        most = self._policy.batch_size
        while budget > 0 and len(self.running) < most and len(later) < most:
            sequence = self._next_waiting()
            if sequence is None:
                break
            prefix = self._cache.find(sequence.request.prompt_tokens)
            if prefix.num_pending_tokens:
                later.append(sequence)
                num_pending_tokens += prefix.num_pending_tokens
            elif self._take_in(sequence, prefix, room):
                budget -= sequence.num_pending
            else:
                self._waiting.appendleft(sequence)
                break
        # To wait until others have computed a beginning costs at most one pass; not to wait, the
        # tokens that are computed several times.
        if num_pending_tokens < self._policy.tokens_per_pass / 2:
            self._take_in_at_once(later, room)
        self._waiting.extendleft(reversed(later))

    def _take_in_at_once(self, later: deque[Sequence], room: "_Room") -> None:
        """Those of `later` that there is room for, although their beginning is being computed."""
        while later and len(self.running) < self._policy.batch_size:
            prefix = self._cache.find(later[0].request.prompt_tokens)
            if not self._take_in(later[0], prefix, room):
                return
            later.popleft()

    def _take_in(self, sequence: Sequence, prefix: KvPrefix, room: "_Room") -> bool:
        """Admits a sequence, if the cache will probably hold it until it ends."""
        if not self._will_fit(sequence, prefix, room):
            if self.running:
                return False
            # Alone it can have all pages; whoever feeds us has checked that these suffice.
            room.add(sequence, 0, self._expected_left(sequence))
        self._cache.begin(
            sequence, sequence.request.prompt_tokens, prefix, tokens=sequence.num_tokens
        )
        sequence.num_cached = prefix.num_tokens
        self.num_shared_tokens += prefix.num_tokens
        self._prefilling.append(sequence)
        self.running.append(sequence)
        return True

    def _will_fit(self, sequence: Sequence, prefix: KvPrefix, room: "_Room") -> bool:
        """Whether there are pages now, and probably will be until everybody has ended."""
        num_kept = self._cache.num_unheld(prefix)
        needed = pages_of(sequence.num_tokens) - len(prefix.pages) + num_kept
        return needed <= self._cache.num_free_pages and room.holds(
            sequence, len(prefix.pages) - num_kept, self._expected_left(sequence)
        )

    def _room(self, left: Callable[[Sequence], int]) -> "_Room":
        """The cache with everybody who is in work, and the tokens that each will still get."""
        room = _Room(self._cache.num_pages - self._cache.num_pages_held_jointly)
        for sequence in self.running:
            num_joint = self._cache.num_joint_pages(sequence)
            room.add(sequence, num_joint, left(sequence))
        return room

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
        for sequence in self._source:
            self._num_taken += 1
            if not sequence.is_dropped:
                return sequence
        return None

    def _in_work(self, sequence: Sequence, num_joint_pages: int) -> InWork:
        return InWork(
            pending=0 if sequence.is_decoding else sequence.num_pending,
            cached=sequence.num_cached,
            shared=min(PAGE_TOKENS * num_joint_pages, sequence.num_cached),
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


class _Room:
    """Sequences in a cache: what each has now, and what it will still get."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._tokens: list[int] = []
        self._left: list[int] = []

    def add(self, sequence: Sequence, num_joint_pages: int, left: int) -> None:
        """Pages that it holds jointly are not counted as its own."""
        self._tokens.append(sequence.num_tokens - PAGE_TOKENS * num_joint_pages)
        self._left.append(left)

    def holds(self, sequence: Sequence, num_joint_pages: int, left: int) -> bool:
        """Adds a sequence, if there is room for all of them until they end."""
        self.add(sequence, num_joint_pages, left)
        if self.peak <= self._num_pages:
            return True
        self._tokens.pop()
        self._left.pop()
        return False

    @property
    def peak(self) -> int:
        """Most pages that they will hold at once, joint ones left out."""
        return peak_pages(self._tokens, self._left)


def _longest_left(sequence: Sequence) -> int:
    """Tokens that a sequence gets at most."""
    return sequence.request.sampling.max_tokens - len(sequence.output_tokens)


def fits_cache(sequence_tokens: int, num_pages: int) -> bool:
    """Whether a sequence of that length can ever be computed."""
    return pages_of(sequence_tokens) <= num_pages
