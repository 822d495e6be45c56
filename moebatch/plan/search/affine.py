"""Lanes and memory of a candidate as affine functions of the shares that are still open.

Cost and footprint are affine in the shares once batch, micro-batch and places are fixed, so their
coefficients are found by asking for them at the corners: everything where it is computed, and
then one thing at a time somewhere else. Nothing is written down twice.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from moebatch.layout.division import Division
from moebatch.layout.footprint import Footprint
from moebatch.plan.pricing.cost import CACHE_WAITS
from moebatch.plan.problem import Problem
from moebatch.plan.search.candidates import Candidate, Variable
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Policy

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, kw_only=True, slots=True)
class Affine:
    """``constant + sum(slopes[v] * share[v])`` over shares away from where things are computed."""

    constant: float
    slopes: Mapping[Variable, float]

    def over(self, factor: float) -> "Affine":
        """The same divided by so much."""
        slopes = {variable: slope / factor for variable, slope in self.slopes.items()}
        return Affine(constant=self.constant / factor, slopes=slopes)

    def at(self, shares: Mapping[Variable, float]) -> float:
        """The value for given shares."""
        return self.constant + sum(slope * shares[v] for v, slope in self.slopes.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class AffineCandidate:
    """What the MILP needs to know about a candidate."""

    candidate: Candidate
    lanes: tuple[Mapping[str, Affine], ...]
    """By phase, then by lane or what else limits it: seconds of a pass."""
    memory: Mapping[LevelName, Affine]
    """Bytes by level."""

    def faster(self, lanes: Collection[str], factor: float) -> "AffineCandidate":
        """The same where some lanes take that much less time, and with them what waits for the
        cache: no less than it may take."""
        lanes = {*lanes, CACHE_WAITS}
        phases = (
            {name: time.over(factor) if name in lanes else time for name, time in phase.items()}
            for phase in self.lanes
        )
        return replace(self, lanes=tuple(phases))


def footprints_in_parts(
    problem: Problem, candidate: Candidate, policy: Policy
) -> dict[LevelName, Footprint]:
    """What a policy of the candidate takes where shares need not be whole experts and layers; no
    less than what it takes when they have been rounded."""
    division = Division.in_parts(
        problem.shape,
        problem.memory.groups,
        policy,
        ladder=problem.ladder,
        weight_levels=candidate.weight_levels,
        kv_levels=candidate.kv_levels,
    )
    return problem.footprints(policy, division)


def probe(
    corners: Mapping[Variable | None, Policy], ask: Callable[[Policy], Mapping[Name, float]]
) -> dict[Name, Affine]:
    """What is asked for at the corners of some shares, as functions of these."""
    values = {moved: ask(policy) for moved, policy in corners.items()}
    origin = values.pop(None)
    return {
        name: Affine(
            constant=origin.get(name, 0.0),
            slopes={
                moved: slope
                for moved, there in values.items()
                if moved and (slope := there.get(name, 0.0) - origin.get(name, 0.0))
            },
        )
        for name in sorted(set(origin).union(*values.values()))
    }


def corners_of(candidate: Candidate) -> dict[Variable | None, Policy]:
    """Everything where it is computed (None), and one thing at a time somewhere else."""
    variables, corners = candidate.variables, {}
    for moved in (None, *variables):
        shares = {variable: float(variable == moved) for variable in variables}
        corners[moved] = candidate.placed(shares)
    return corners
