"""What a candidate takes at the least and at the most, without solving anything.

Screening: only candidates that could still be the best are handed to the MILP.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf

from moebatch.layout.footprint import packed_bytes, slot_bytes
from moebatch.layout.lanes import pass_seconds
from moebatch.plan.affine import Affine, AffineCandidate, Known, Variable
from moebatch.plan.candidates import Candidate
from moebatch.plan.pass_tasks import PassTasks
from moebatch.plan.problem import Problem
from moebatch.spec.hardware import LevelName
from moebatch.spec.policy import Placement, Policy

Shares = dict[Variable, float]
_KINDS = ("weights", "kv_cache")
_TOLERANCE = 1e-6
"""By so much bounds that save work are looser, so that no rounding makes them untrue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Seconds per sequence between which the optimum of a candidate lies."""

    lower_s: float
    upper_s: float
    """Infinite where no feasible placement was found by hand."""
    shares: Mapping[Variable, float]
    """A placement that takes `upper_s`."""


def seconds_per_sequence(item: AffineCandidate, shares: Mapping[Variable, float]) -> float:
    """The objective: passes of every kind, each as long as its busiest lane."""
    phases = zip(item.candidate.phases, item.lanes, strict=True)
    return sum(
        phase.num_passes * pass_seconds(lane_seconds(lanes, shares), item.candidate.policy)
        for phase, lanes in phases
    )


def lane_seconds(lanes: Mapping[str, Affine], shares: Mapping[Variable, float]) -> dict[str, float]:
    """Seconds of every lane for given shares."""
    return {lane: formula.at(shares) for lane, formula in lanes.items()}


def least_seconds(known: Known, candidate: Candidate) -> float:
    """Seconds per sequence if everything were where it is computed: cheap to know, and no
    placement takes less."""
    policy = candidate.policy
    return sum(
        phase.num_passes * pass_seconds(known.lanes(phase.load, policy), policy)
        for phase in candidate.phases
    )


class Streaming:
    """What streaming costs at the least, within the budgets of a machine: what many candidates
    share is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._prices = problem.prices
        self._known: dict[Hashable, float] = {}

    def seconds(self, candidate: Candidate) -> float:
        """Seconds per sequence in which those experts come for which there would be no room where
        they are computed if nothing else were there: cheap to know, and no placement takes less.
        Infinite if there must be room for all."""
        policy, levels = candidate.policy, candidate.weight_levels[:2]
        key = candidate.phases, levels, policy.schedule, policy.micro_batch_size
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._seconds(candidate, *levels)
        return found

    def _seconds(
        self, candidate: Candidate, level: LevelName, below: LevelName | None = None
    ) -> float:
        problem, size = self._problem, packed_bytes if level == "vram" else slot_bytes
        needed = problem.num_experts * size(problem.shape, problem.dtypes)
        share = problem.capacity_bytes(level) * (1 + _TOLERANCE) / needed
        if share >= 1:
            return 0.0
        if below is None:
            return inf
        weights = Placement(**{level: share, below: 1 - share})
        policy = replace(candidate.policy, weights=weights)
        transfers = (
            (phase, PassTasks(prices=self._prices, load=phase.load, policy=policy))
            for phase in candidate.phases
        )
        seconds = sum(phase.num_passes * moving.weights_s for phase, moving in transfers)
        return (1 - _TOLERANCE) * seconds


def seconds_under(problem: Problem, candidate: Candidate, policy: Policy) -> float:
    """Seconds per sequence when a candidate's shares are those of `policy`."""
    cost = problem.cost
    return sum(
        phase.num_passes * pass_seconds(cost.lanes(phase.load, policy), policy)
        for phase in candidate.phases
    )


def bounds(problem: Problem, item: AffineCandidate) -> Bounds:
    """Upper: what does not fit is moved down, the one kind first or the other."""
    best = min(
        (_upper(problem, item, order) for order in permutations(_KINDS)),
        key=lambda found: found[0],
    )
    return Bounds(lower_s=lower_seconds(problem, item), upper_s=best[0], shares=best[1])


def filled(problem: Problem, item: AffineCandidate, order: Sequence[str] = _KINDS) -> Shares:
    """Shares where what does not fit on a level is moved down, kind by kind in that order. The
    lowest level may then hold more than it can."""
    shares: Shares = dict.fromkeys(item.variables, 0.0)
    for level in problem.hardware.levels:
        for kind in order:
            _move_down(problem, item, shares, kind, level)
    return shares


def _upper(problem: Problem, item: AffineCandidate, order: Sequence[str]) -> tuple[float, Shares]:
    shares = filled(problem, item, order)
    for level, memory in item.memory.items():
        if memory.at(shares) > problem.capacity_bytes(level) * (1 + 1e-9) + 1:
            return float("inf"), shares
    return seconds_per_sequence(item, shares), shares


def _move_down(
    problem: Problem, item: AffineCandidate, shares: Shares, kind: str, level: LevelName
) -> None:
    """Moves as much of a kind from a level to the next one below as it is over its capacity."""
    levels = item.candidate.weight_levels if kind == "weights" else item.candidate.kv_levels
    if level not in levels[:-1]:
        return
    below = levels[levels.index(level) + 1]
    memory = item.memory[level]
    excess = memory.at(shares) - problem.capacity_bytes(level)
    here = shares.get((kind, level), 1 - sum(shares[kind, name] for name in levels[1:]))
    gained = memory.slopes.get((kind, level), 0.0) - memory.slopes.get((kind, below), 0.0)
    if excess <= 0 or gained <= 0:
        return
    moved = min(here, excess / gained)
    if (kind, level) in shares:
        shares[kind, level] -= moved
    shares[kind, below] += moved


def lower_seconds(problem: Problem, item: AffineCandidate) -> float:
    """Seconds per sequence that no placement goes below: experts have all memory that the cache
    could leave them, and the cache costs no time."""
    shares: Shares = dict.fromkeys(item.variables, 0.0)
    levels = item.candidate.weight_levels
    for index, level in enumerate(levels[:-1]):
        memory = item.memory[level]
        cheapest = memory.constant + min(
            0.0, *(s for (kind, _), s in memory.slopes.items() if kind == "kv_cache"), 0.0
        )
        room = (
            problem.capacity_bytes(level)
            - cheapest
            - sum(memory.slopes.get(v, 0.0) * share for v, share in shares.items())
        )
        below = levels[index + 1]
        gained = memory.slopes.get(("weights", level), 0.0) - memory.slopes.get(
            ("weights", below), 0.0
        )
        if room >= 0 or gained <= 0:
            continue
        here = shares.get(("weights", level), 1.0 - sum(shares[v] for v in shares))
        moved = min(here, -room / gained)
        if ("weights", level) in shares:
            shares["weights", level] -= moved
        shares["weights", below] += moved
    return seconds_per_sequence(item, shares)
