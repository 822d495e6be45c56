"""What a candidate takes at the least and at the most, without solving anything.

Screening: only candidates that could still be the best are handed to the MILP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from moebatch.layout.lanes import LaneSeconds, pass_seconds
from moebatch.layout.load import PassLoad
from moebatch.plan.problem import Problem
from moebatch.plan.search.affine import Affine, AffineCandidate
from moebatch.plan.search.candidates import KINDS, Candidate, Variable
from moebatch.plan.search.known import Known
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Policy

Shares = dict[Variable, float]


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
    return _passes_s(candidate, candidate.policy, known.limits)


def least_with_room(problem: Problem, known: Known, candidate: Candidate) -> float:
    """The same if the level that computes experts held nothing else, and the others came from the
    level below, if there is one: no placement that fits takes less."""
    policy = candidate.policy
    level = problem.ladder.experts_at(policy)
    if policy.num_slots and problem.ladder.below(level) is not None:
        room = problem.capacity_bytes(level) // problem.memory.expert_sizes[level]
        policy = problem.with_residents(policy, room)
    return _passes_s(candidate, policy, known.limits)


def seconds_under(problem: Problem, candidate: Candidate, policy: Policy) -> float:
    """Seconds per sequence when a candidate's shares are those of `policy`."""
    return _passes_s(candidate, policy, lambda load, policy: problem.cost_of(load, policy).limits)


def _passes_s(
    candidate: Candidate, policy: Policy, limits_of: Callable[[PassLoad, Policy], LaneSeconds]
) -> float:
    """The objective where a candidate's shares are those of `policy`."""
    return sum(
        phase.num_passes * pass_seconds(limits_of(phase.load, policy), policy)
        for phase in candidate.phases
    )


def bounds(problem: Problem, item: AffineCandidate) -> Bounds:
    """Upper: what does not fit is moved down, the one kind first or the other."""
    one, other = (filled(problem, item, order) for order in permutations(KINDS))
    tried = [one] if one == other else [one, other]
    upper_s, shares = min(
        ((_seconds_if_it_fits(problem, item, shares), shares) for shares in tried),
        key=lambda found: found[0],
    )
    return Bounds(lower_s=lower_seconds(problem, item), upper_s=upper_s, shares=shares)


def filled(problem: Problem, item: AffineCandidate, order: Sequence[str] = KINDS) -> Shares:
    """Shares where what does not fit on a level is moved down, kind by kind in that order. The
    lowest level may then hold more than it can."""
    shares: Shares = dict.fromkeys(item.candidate.variables, 0.0)
    for level in problem.hardware.levels:
        for kind in order:
            _move_down(problem, item, shares, kind, level)
    return shares


def _seconds_if_it_fits(problem: Problem, item: AffineCandidate, shares: Shares) -> float:
    """Infinite if it does not."""
    for level, memory in item.memory.items():
        if memory.at(shares) > problem.capacity_bytes(level) * (1 + 1e-9) + 1:
            return float("inf")
    return seconds_per_sequence(item, shares)


def _move_down(
    problem: Problem, item: AffineCandidate, shares: Shares, kind: str, level: LevelName
) -> None:
    """Moves as much of a kind from a level to the next one below as it is over its capacity."""
    levels = item.candidate.levels(kind)
    if level not in levels[:-1]:
        return
    memory = item.memory[level]
    excess = memory.at(shares) - problem.capacity_bytes(level)
    if excess <= 0:
        return
    below = levels[levels.index(level) + 1]
    here = shares.get((kind, level), 1 - sum(shares[kind, name] for name in levels[1:]))
    gained = memory.slopes.get((kind, level), 0.0) - memory.slopes.get((kind, below), 0.0)
    if gained <= 0:
        return
    moved = min(here, excess / gained)
    if (kind, level) in shares:
        shares[kind, level] -= moved
    shares[kind, below] += moved


def lower_seconds(problem: Problem, item: AffineCandidate) -> float:
    """Seconds per sequence that no placement goes below: experts have all memory that the cache
    could leave them, and the cache costs no time."""
    memory = {level: _beside_least_cache(taken) for level, taken in item.memory.items()}
    return seconds_per_sequence(item, filled(problem, replace(item, memory=memory), ("weights",)))


def _beside_least_cache(memory: Affine) -> Affine:
    """What experts take of a level, and the least that the cache may."""
    cache = (slope for (kind, _), slope in memory.slopes.items() if kind == "kv_cache")
    experts = {v: slope for v, slope in memory.slopes.items() if v[0] == "weights"}
    return Affine(constant=memory.constant + min(0.0, *cache, 0.0), slopes=experts)
