"""What a search has asked about policies, and need not work out again."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter

from moebatch.layout.lanes import LaneSeconds
from moebatch.layout.load import PassLoad
from moebatch.once import once
from moebatch.plan.prediction import at_end
from moebatch.plan.pricing.cost import PassCost
from moebatch.plan.pricing.pass_tasks import Arithmetic
from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import FEW_LOADS, rough_loads, thinned
from moebatch.plan.replay.phases import Phase, phases_of
from moebatch.plan.search.affine import (
    Affine,
    AffineCandidate,
    corners_of,
    footprints_in_parts,
    probe,
)
from moebatch.plan.search.candidates import Candidate
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Policy

_HARDLY_MORE = 2
"""Where there are up to so many times as many loads as are asked for, they are not counted
together: pairs are unlike where there are few, and who comes near is priced by all of them next."""
_SOONEST: tuple[Callable[[PassCost], LaneSeconds], ...] = (
    attrgetter("bringing_s"),
    attrgetter("computing_s"),
    attrgetter("lanes_once"),
)
"""Busy lanes of a pass, those first that are worked out soonest."""


class Known:
    """What is known of policies for a problem: candidates of several kinds share lanes, several
    climbs meet the same neighbours, and nothing of it depends on capacities."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._arithmetic: Arithmetic = {}
        self._limits: dict[tuple[PassLoad, Policy], Mapping[str, float]] = {}
        self._memory: dict[Candidate, Mapping[LevelName, Affine]] = {}
        self._items: dict[Candidate, AffineCandidate] = {}
        self._phases: dict[tuple[int, int, int], tuple[Phase, ...]] = {}
        self._mean_s: dict[Policy, float] = {}
        self._replayed_s: dict[tuple[Policy, int], float] = {}

    def at_rates_of(self, problem: Problem) -> "Known":
        """What of it is known of the same problem where links or processors have other rates, or
        where experts are stored otherwise: else candidates take as much memory there, and
        processors that are the same as long."""
        known = Known(problem)
        if problem.dtypes == self._problem.dtypes:
            known._memory = self._memory
        if problem.prices.computes_like(self._problem.prices):
            known._arithmetic = self._arithmetic
        return known

    def limits(self, load: PassLoad, policy: Policy) -> Mapping[str, float]:
        """Seconds of every lane during a pass, and what else limits it."""
        return once(self._limits, (load, policy), lambda: self._cost_of(load, policy).limits)

    def experts_s(self, load: PassLoad, policy: Policy) -> float:
        """Of these, the seconds of experts alone."""
        return self._cost_of(load, policy).experts_s

    def affine(self, candidate: Candidate) -> AffineCandidate:
        """Probes cost and footprint of a candidate at the corners of its shares."""
        return once(self._items, candidate, lambda: self._probed(candidate))

    def _probed(self, candidate: Candidate) -> AffineCandidate:
        corners = corners_of(candidate)
        return AffineCandidate(
            candidate=candidate,
            lanes=tuple(probe(corners, partial(self.limits, p.load)) for p in candidate.phases),
            memory=self.memory(candidate),
        )

    def memory(self, candidate: Candidate) -> Mapping[LevelName, Affine]:
        """Probes the footprint alone."""
        of_bytes = partial(self._bytes, candidate)
        return once(self._memory, candidate, lambda: probe(corners_of(candidate), of_bytes))

    def _bytes(self, candidate: Candidate, policy: Policy) -> dict[LevelName, float]:
        levels = footprints_in_parts(self._problem, candidate, policy)
        return {level: footprint.total_bytes for level, footprint in levels.items()}

    def mean_s(self, policy: Policy) -> float:
        """Seconds per sequence of the job by mean lengths."""
        return once(self._mean_s, policy, lambda: _seconds(self._passes(policy)))

    def is_faster(self, policy: Policy, enough_s: float) -> bool:
        """Whether a policy takes less than that by mean lengths. No more is worked out of one that
        does not than some of its lanes, if these show it."""
        found = self._mean_s.get(policy)
        if found is None:
            passes = self._passes(policy)
            for lanes_of in _SOONEST:
                least_s = sum([number * max(lanes_of(cost).values()) for number, cost in passes])
                if least_s >= enough_s:
                    return False
            found = self._mean_s[policy] = _seconds(passes)
        return found < enough_s

    def _passes(self, policy: Policy) -> list[tuple[float, PassCost]]:
        """Numbers of passes per sequence, and what one of them costs."""
        phases = self._phases_of(policy)
        return [(one.num_passes, self._cost_of(one.load, policy)) for one in phases]

    def _phases_of(self, policy: Policy) -> tuple[Phase, ...]:
        workload, room = self._problem.workload, policy.room
        return once(self._phases, room, lambda: phases_of(workload, room))

    def replayed_s(self, policy: Policy, *, most: int = FEW_LOADS) -> float:
        """Seconds of a token of the job, by a rough replay in so many loads at the most."""
        found = self._replayed_s.get((policy, most))
        if found is None:
            loads = rough_loads(self._problem.workload, policy)
            if most < FEW_LOADS and len(loads) <= _HARDLY_MORE * most:
                return self.replayed_s(policy)
            total_s = generated = 0.0
            encodes = self._problem.workload.is_encoded
            for count, load in thinned(loads, most, encodes=encodes):
                then = at_end(self._problem, policy, load)
                total_s += count * self._cost_of(load, then).seconds
                generated += count * load.logits_rows
            found = self._replayed_s[policy, most] = total_s / generated
        return found

    def _cost_of(self, load: PassLoad, policy: Policy) -> PassCost:
        return self._problem.cost_of(load, policy, self._arithmetic)


def _seconds(passes: Iterable[tuple[float, PassCost]]) -> float:
    return sum(number * cost.seconds for number, cost in passes)
