"""What a search has asked about policies, and need not work out again."""

from collections.abc import Mapping
from functools import partial

from moebatch.layout.load import PassLoad
from moebatch.plan.prediction import at_end
from moebatch.plan.pricing.pass_tasks import Arithmetic
from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import FEW_LOADS, rough_loads, thinned
from moebatch.plan.replay.phases import phases_of
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


class Known:
    """What is known of policies for a problem: candidates of several kinds share lanes, several
    climbs meet the same neighbours, and nothing of it depends on capacities."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._arithmetic: Arithmetic = {}
        self._limits: dict[tuple[PassLoad, Policy], Mapping[str, float]] = {}
        self._memory: dict[Candidate, Mapping[LevelName, Affine]] = {}
        self._items: dict[Candidate, AffineCandidate] = {}
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
        found = self._limits.get((load, policy))
        if found is None:
            found = self._problem.cost_of(load, policy, self._arithmetic).limits
            self._limits[load, policy] = found
        return found

    def affine(self, candidate: Candidate) -> AffineCandidate:
        """Probes cost and footprint of a candidate at the corners of its shares."""
        found = self._items.get(candidate)
        if found is None:
            found = self._items[candidate] = self._probed(candidate)
        return found

    def _probed(self, candidate: Candidate) -> AffineCandidate:
        corners = corners_of(candidate)
        if candidate not in self._memory:
            self._memory[candidate] = probe(corners, partial(self._bytes, candidate))
        return AffineCandidate(
            candidate=candidate,
            lanes=tuple(probe(corners, partial(self.limits, p.load)) for p in candidate.phases),
            memory=self._memory[candidate],
        )

    def _bytes(self, candidate: Candidate, policy: Policy) -> dict[LevelName, float]:
        levels = footprints_in_parts(self._problem, candidate, policy)
        return {level: footprint.total_bytes for level, footprint in levels.items()}

    def mean_s(self, policy: Policy) -> float:
        """Seconds per sequence of the job by mean lengths."""
        found = self._mean_s.get(policy)
        if found is None:
            phases = phases_of(self._problem.workload, policy)
            found = sum(p.num_passes * self._pass_s(p.load, policy) for p in phases)
            self._mean_s[policy] = found
        return found

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
                total_s += count * self._pass_s(load, at_end(self._problem, policy, load))
                generated += count * load.logits_rows
            found = self._replayed_s[policy, most] = total_s / generated
        return found

    def _pass_s(self, load: PassLoad, policy: Policy) -> float:
        return self._problem.cost_of(load, policy, self._arithmetic).seconds
