"""How long the rest of a run takes: the passes that are left, at the rate of those so far.

What is left is replayed from where the run stands, as the planner replays whole jobs, and priced
by its cost model; how much slower or faster the machine is than that shows in the passes so far,
and in how busy each lane was.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from moebatch.arrays import Ints
from moebatch.engine.progress.endings import Endings, InWork
from moebatch.layout.admission import Caps, fields_of
from moebatch.layout.lanes import pass_seconds
from moebatch.layout.load import PassLoad
from moebatch.plan.prediction import at_end
from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import num_replayed, rest_loads
from moebatch.plan.replay.passes import Replay, admission_order
from moebatch.spec.policy.policy import Policy

_MOST_LOADS = 200
"""Of more passes, neighbours are priced together."""
_MOST_SEQUENCES = 24_000
"""Of more, so many stand for all."""
_COST_SHARE = 0.005
"""Share of its time that a run may spend on replays of its rest."""
_WINDOW = 64
"""Passes of a kind from which its rate is estimated."""
_MOST_REMEMBERED = 4096
_PRIOR_PASSES = 0.5
"""Weight of the plan, in passes."""
_SLIGHT_SHARE = 0.05
"""Of a pass: a lane that should be busy for less tells little of how slow it is."""
_COMMON_PASSES = 2.0
"""Weight of the rate of all passes in that of a kind, in passes."""
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
    waiting_first: tuple[InWork, ...] = ()
    """They were in work and were sent back, or another sequence is about to compute how they
    begin."""
    num_taken: int = 0
    """Sequences that have been taken from those that wait."""
    batch_size: int | None = None
    """Sequences and tokens of a pass, where they are fewer than the policy says."""
    tokens_per_pass: int | None = None
    num_joint_pages: int = 0
    """Pages that several sequences hold."""

    def limited(self, policy: Policy) -> Policy:
        """The policy with the sequences, tokens and pages that there are."""
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
        """`clock` measures what a replay costs."""
        self._problem = problem
        self._policy = policy
        self._clock = clock
        self._kinds: dict[bool, deque[tuple[float, _Priced]]] = {
            kind: deque(maxlen=_WINDOW) for kind in (True, False)
        }
        """Seconds of the newest passes with prompts, and of those without."""
        self._since_rest: deque[tuple[int, _Priced]] = deque(maxlen=_MOST_REMEMBERED)
        self._num_passes = 0
        self._passes_s = 0.0
        """Seconds that all passes so far should have taken."""
        self._lanes_s: dict[str, float] = {}
        """Seconds that lanes should have been busy in all passes so far."""
        self._rest: _Rest | None = None
        self._due_s = float("-inf")

    def add(self, passes: Iterable[PassDone]) -> None:
        """Takes in passes that have ended since, in their order."""
        for done in passes:
            policy = self._policy
            if done.num_grown:
                staying = policy.weights.dram * self._problem.num_experts
                policy = self._problem.with_residents(policy, staying + done.num_grown)
            priced = self._price(done.load, policy)
            self._kinds[done.load.prompt_tokens > 0].append((done.seconds, priced))
            self._since_rest.append((done.number, priced))
            self._num_passes += 1
            self._passes_s += priced.seconds
            for lane, seconds in priced.lanes.items():
                self._lanes_s[lane] = self._lanes_s.get(lane, 0.0) + seconds

    def seconds(
        self,
        standing: Standing,
        endings: Endings,
        *,
        busy_s: Mapping[str, float] | None = None,
        since_s: float = 0.0,
    ) -> float:
        """Seconds that are left, `since_s` after the last pass that was added; `busy_s` are those
        in which lanes have been busy so far."""
        rest = self._rest_at(standing, endings)
        slowness = self._slowness(busy_s or {})
        by_kind = dict.fromkeys((True, False), 0.0)
        for count, has_prompts, priced in rest.passes:
            by_kind[has_prompts] += count * priced.at(slowness)
        total_s = sum(by_kind.values())
        if not total_s:
            return 0.0
        rates = self._rates(slowness)
        rate = sum(by_kind[kind] * rates[kind] for kind in by_kind) / total_s
        gone_s = sum(priced.at(slowness) for _, priced in self._since_rest)
        next_s = rest.passes[0][2].at(slowness)
        # Of the pass in work no more can be over than what it should take.
        return max(0.0, total_s - gone_s - min(since_s / rate, next_s)) * rate

    def _slowness(self, busy_s: Mapping[str, float]) -> dict[str, float]:
        """How much longer than priced lanes are busy. Which of them a pass waits for may be another
        one than was planned; at first they are taken to be as fast as the plan says, and longer so
        where they should have next to nothing to do."""
        slowness, slight_s = {}, _SLIGHT_SHARE * self._passes_s
        for lane, priced_s in self._lanes_s.items():
            if lane in busy_s:
                prior_s = (_PRIOR_PASSES * priced_s + slight_s) / self._num_passes
                slowness[lane] = (busy_s[lane] + prior_s) / (priced_s + prior_s)
        return slowness

    def _rates(self, slowness: Mapping[str, float]) -> dict[bool, float]:
        """How long passes with prompts, and those without, take: measured over priced."""
        seen = {
            kind: [(seconds / price, price) for seconds, p in some if (price := p.at(slowness)) > 0]
            for kind, some in self._kinds.items()
        }
        everything = [*seen[True], *seen[False]]
        if not everything:
            return dict.fromkeys(seen, 1.0)
        each_s = sum(price for _, price in everything) / len(everything)
        common = _typical([*everything, (1.0, _PRIOR_PASSES * each_s)])
        return {
            kind: _typical([*ratios, (common, _COMMON_PASSES * each_s)])
            for kind, ratios in seen.items()
        }

    def _price(self, load: PassLoad, policy: Policy) -> "_Priced":
        cost = self._problem.cost_of(load, policy)
        return _Priced(cost.lanes, policy, cost.seconds)

    def _rest_at(self, standing: Standing, endings: Endings) -> "_Rest":
        """The rest as it was at the last replay, or at a new one where that pays."""
        begun_s = self._clock()
        is_old = self._rest is None or standing.num_passes > self._rest.num_passes
        if self._rest is None or (is_old and begun_s >= self._due_s):
            self._rest = self._replayed(standing, endings)
            while self._since_rest and self._since_rest[0][0] <= standing.num_passes:
                self._since_rest.popleft()
            self._due_s = self._clock() + (self._clock() - begun_s) / _COST_SHARE
        return self._rest

    def _replayed(self, standing: Standing, endings: Endings) -> "_Rest":
        policy = standing.limited(self._policy)
        waiting, num_more = self._waiting(standing)
        before = (*standing.in_work, *standing.waiting_first)
        left, waiting[:, 1] = endings.expected_new(before, waiting[:, 1])
        rows = [(*one.row, new) for one, new in zip(before, left.tolist(), strict=True)]
        num_running = len(standing.in_work)
        # Those that wait have nothing in the cache, but what others hold.
        first = np.array(rows[num_running:], np.int64).reshape(-1, 4)[:, [0, 3, 2]]
        lengths = np.concatenate([first, waiting])
        workload = self._problem.workload
        caps = Caps.of(policy, workload.most_cached, encodes=workload.is_encoded)
        rest = Replay(lengths, caps, fields_of(rows[:num_running]))
        mean_new = float(waiting[:, 1].mean()) if len(waiting) else 1.0
        batch_size, encodes = policy.batch_size, workload.is_encoded
        loads = rest_loads(rest, batch_size, num_more, mean_new, most=_MOST_LOADS, encodes=encodes)
        passes = (
            (count, load.prompt_tokens > 0, at_end(self._problem, self._policy, load), load)
            for count, load in loads
        )
        return _Rest(
            standing.num_passes,
            [(count, kind, self._price(load, then)) for count, kind, then, load in passes],
        )

    def _waiting(self, standing: Standing) -> tuple[Ints, int]:
        """Lengths of sequences that have not been taken in, or of some that stand for all, and how
        many more there are."""
        total = self._problem.workload.num_sequences or 0
        num_left = max(0, total - standing.num_taken)
        waiting = self._order[len(self._order) - len(self._order) * num_left // max(1, total) :]
        left = replace(self._problem.workload, num_sequences=num_left)
        count = min(len(waiting), num_replayed(left, self._policy.batch_size))
        evenly = np.arange(count) * len(waiting) // max(1, count)
        return waiting[evenly], num_left - count

    @cached_property
    def _order(self) -> Ints:
        workload = self._problem.workload
        count = min(workload.num_sequences or 0, _MOST_SEQUENCES)
        return admission_order(workload.sample, count, is_static=self._policy.batching == "static")


class _Priced(NamedTuple):
    """What a pass should take."""

    lanes: Mapping[str, float]
    policy: Policy
    seconds: float

    def at(self, slowness: Mapping[str, float]) -> float:
        """Seconds where lanes take so much longer. What lanes wait for beside each other grows as
        the slowest of them."""
        lanes = {lane: seconds * slowness.get(lane, 1.0) for lane, seconds in self.lanes.items()}
        planned_s, now_s = pass_seconds(self.lanes, self.policy), pass_seconds(lanes, self.policy)
        waits_s = self.seconds - planned_s
        return now_s + waits_s * now_s / planned_s if waits_s > 0 and planned_s else now_s


class _Rest(NamedTuple):
    """Passes that are left: how many of each, whether they have prompts, and what each takes."""

    num_passes: int
    """Passes that had ended when it was replayed."""
    passes: Sequence[tuple[float, bool, _Priced]]


_Weighed = tuple[float, float]
"""A ratio, and its weight."""


def _typical(ratios: Sequence[_Weighed]) -> float:
    """The mean of ratios, where none counts as further from their median than `_FAR`."""
    ordered = sorted(ratios)
    up_to = list(accumulate(weight for _, weight in ordered))
    median = ordered[bisect_left(up_to, up_to[-1] / 2)][0]
    near = ((min(max(ratio, median / _FAR), median * _FAR), weight) for ratio, weight in ordered)
    return sum(ratio * weight for ratio, weight in near) / up_to[-1]
