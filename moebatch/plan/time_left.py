"""How long the rest of a run takes: the passes that are left, at the rate of those so far.

What is left is replayed from where the run stands, as the planner replays whole jobs, and priced
by its cost model; how much slower or faster the machine is than that shows in the passes so far.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from moebatch.plan.endings import Endings, InWork
from moebatch.plan.load import PassLoad
from moebatch.plan.passes import Ints, Seats, admission_order
from moebatch.plan.prediction import at_end, with_more_residents
from moebatch.plan.problem import Problem
from moebatch.plan.replay import num_replayed, rest_loads
from moebatch.spec.policy import Policy

_MOST_LOADS = 200
"""Of more passes, neighbours are priced together."""
_MOST_SEQUENCES = 24_000
"""Of more, so many stand for all."""
_COST_SHARE = 0.005
"""Share of its time that a run may spend on replays of its rest."""
_WINDOW = 64
"""Passes of a kind that tell its rate."""
_MOST_REMEMBERED = 4096
_PRIOR_PASSES = 0.5
"""So many passes speak for the plan."""
_COMMON_PASSES = 2.0
"""So many passes of a kind speak for the rate of all."""
_FAR = 1.3
"""A pass that is further from the median than this counts as if it were so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassDone:
    """A pass of a run."""

    number: int
    """From 1."""
    load: PassLoad
    seconds: float
    """Since the end of the pass before."""
    num_grown: int = 0
    """Experts that had become resident by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run stands between two passes."""

    num_passes: int = 0
    in_work: tuple[InWork, ...] = ()
    """In the order of their admission."""
    returned: tuple[InWork, ...] = ()
    """Those that wait before all others, as they were taken in before."""
    num_taken: int = 0
    """Sequences that have been taken from those that wait."""
    batch_size: int | None = None
    """Seats and tokens of a pass, where they are fewer than the policy says."""
    tokens_per_pass: int | None = None
    num_joint_pages: int = 0
    """Pages that several sequences hold."""

    def limited(self, policy: Policy) -> Policy:
        """The policy with the seats, tokens and pages that there are."""
        return replace(
            policy,
            batch_size=self.batch_size or policy.batch_size,
            tokens_per_pass=self.tokens_per_pass or policy.tokens_per_pass,
            num_kv_pages=max(1, policy.num_kv_pages - self.num_joint_pages),
        )


class TimeLeft:
    """Seconds that are left of one run. Not for several threads at once."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` tells what a replay costs."""
        self._problem = problem
        self._policy = policy
        self._cost = problem.cost
        self._clock = clock
        self._rates = _Rates()
        self._priced: deque[tuple[int, float]] = deque([(0, 0.0)], maxlen=_MOST_REMEMBERED)
        """Passes, and what all up to them should have taken."""
        self._rest: _Rest | None = None
        self._due_s = float("-inf")

    def add(self, passes: Iterable[PassDone]) -> None:
        """Takes in passes that have ended since, in their order."""
        for done in passes:
            policy = self._policy
            if done.num_grown:
                policy = with_more_residents(self._problem, policy, done.num_grown)
            priced_s = self._cost.seconds(done.load, policy)
            self._rates.add(done.load, done.seconds, priced_s)
            self._priced.append((done.number, self._priced[-1][1] + priced_s))

    def seconds(self, standing: Standing, endings: Endings, *, since_s: float = 0.0) -> float:
        """Seconds that are left, `since_s` after the last pass that was added."""
        rest = self._rest_at(standing, endings)
        rate = self._rates.of(rest)
        gone_s = self._priced[-1][1] - self._priced_at(rest.num_passes)
        # Of the pass in work no more can be over than what it should take.
        return max(0.0, (rest.total_s - gone_s) * rate - min(since_s, rest.next_s * rate))

    def _rest_at(self, standing: Standing, endings: Endings) -> "_Rest":
        """The rest as it was at the last replay, or at a new one where that pays."""
        begun_s = self._clock()
        is_old = self._rest is None or standing.num_passes > self._rest.num_passes
        if self._rest is None or (is_old and begun_s >= self._due_s):
            self._rest = self._replayed(standing, endings)
            self._due_s = self._clock() + (self._clock() - begun_s) / _COST_SHARE
        return self._rest

    def _priced_at(self, num_passes: int) -> float:
        """What all passes up to one should have taken."""
        known = (seconds for number, seconds in reversed(self._priced) if number <= num_passes)
        return next(known, self._priced[0][1])

    def _replayed(self, standing: Standing, endings: Endings) -> "_Rest":
        policy = standing.limited(self._policy)
        waiting, num_more = self._waiting(standing)
        before = (*standing.in_work, *standing.returned)
        left, waiting[:, 1] = endings.expected_new(before, waiting[:, 1])
        first = np.array([one.row for one in before], np.int64).reshape(-1, 3)
        first, num_running = np.column_stack([first, left]), len(standing.in_work)
        # Those that were sent back have nothing in the cache.
        returned = first[num_running:, [0, 3, 2]]
        seats = Seats(np.concatenate([returned, waiting]), policy, first[:num_running])
        mean_new = float(waiting[:, 1].mean()) if len(waiting) else 1.0
        rest = _Rest(num_passes=standing.num_passes)
        for count, load in rest_loads(seats, policy, num_more, mean_new, most=_MOST_LOADS):
            then = at_end(self._problem, self._policy, load)
            rest.add(count, load, self._cost.seconds(load, then))
        return rest

    def _waiting(self, standing: Standing) -> tuple[Ints, int]:
        """Lengths of sequences that have not been taken in, or of some that stand for all, and how
        many more there are."""
        total = self._problem.workload.num_sequences or 0
        num_left = max(0, total - standing.num_taken)
        waiting = self._order[len(self._order) - len(self._order) * num_left // max(1, total) :]
        left = replace(self._problem.workload, num_sequences=num_left)
        count = min(len(waiting), num_replayed(left, self._policy))
        evenly = np.arange(count) * len(waiting) // max(1, count)
        return waiting[evenly], num_left - count

    @cached_property
    def _order(self) -> Ints:
        workload = self._problem.workload
        count = min(workload.num_sequences or 0, _MOST_SEQUENCES)
        return admission_order(workload.sample, count, self._policy)


@dataclass(kw_only=True, slots=True)
class _Rest:
    """What passes that are left should take, those with prompts and those without."""

    num_passes: int
    """Passes that had ended when it was replayed."""
    with_prompts_s: float = 0.0
    decoding_s: float = 0.0
    next_s: float = 0.0
    """Of the first of them."""

    @property
    def total_s(self) -> float:
        return self.with_prompts_s + self.decoding_s

    def add(self, count: float, load: PassLoad, each_s: float) -> None:
        self.next_s = self.next_s or each_s
        if load.prompt_tokens:
            self.with_prompts_s += count * each_s
        else:
            self.decoding_s += count * each_s


class _Rates:
    """How long passes take, measured over priced: those with prompts, and those without."""

    def __init__(self) -> None:
        self._seen: dict[bool, deque[_Weighed]] = {
            kind: deque(maxlen=_WINDOW) for kind in (True, False)
        }

    def add(self, load: PassLoad, seconds: float, priced_s: float) -> None:
        if priced_s > 0:
            self._seen[load.prompt_tokens > 0].append((seconds / priced_s, priced_s))

    def of(self, rest: _Rest) -> float:
        """Of the passes that are left, by what kinds they are of."""
        everything = [*self._seen[True], *self._seen[False]]
        if not everything or not rest.total_s:
            return 1.0
        each_s = sum(weight for _, weight in everything) / len(everything)
        common = _typical([*everything, (1.0, _PRIOR_PASSES * each_s)])
        with_prompts, decoding = (
            _typical([*self._seen[kind], (common, _COMMON_PASSES * each_s)])
            for kind in (True, False)
        )
        total_s = rest.with_prompts_s * with_prompts + rest.decoding_s * decoding
        return total_s / rest.total_s


_Weighed = tuple[float, float]
"""A ratio, and its weight."""


def _typical(ratios: Sequence[_Weighed]) -> float:
    """The mean of ratios, where none counts as further from their median than `_FAR`."""
    ordered = sorted(ratios)
    up_to = list(accumulate(weight for _, weight in ordered))
    median = ordered[bisect_left(up_to, up_to[-1] / 2)][0]
    near = ((min(max(ratio, median / _FAR), median * _FAR), weight) for ratio, weight in ordered)
    return sum(ratio * weight for ratio, weight in near) / up_to[-1]
