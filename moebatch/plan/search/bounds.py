"""What a candidate takes at the least and at the most, without solving anything.

Screening: only candidates that could still be the best are handed to the MILP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from moebatch.layout.lanes import LaneSeconds, pass_seconds
from moebatch.layout.load import PassLoad
from moebatch.plan.problem import Problem
from moebatch.plan.search.affine import Affine, AffineCandidate
from moebatch.plan.search.candidates import KINDS, Candidate, Variable
from moebatch.plan.search.known import Known
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Policy

Shares = dict[Variable, float]
Memory = Mapping[LevelName, Affine]
"""Bytes of a candidate by level."""


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


def least_experts_s(known: Known, candidate: Candidate) -> float:
    """Seconds per sequence of its experts alone: known sooner than `least_seconds`, and no more."""
    policy = candidate.policy
    return sum([one.num_passes * known.experts_s(one.load, policy) for one in candidate.phases])


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


def bounds(problem: Problem, item: AffineCandidate, placements: Sequence[Shares]) -> Bounds:
    """From the least that it can take to the best of those `placements` that fit."""
    timed = [(seconds_per_sequence(item, shares), shares) for shares in placements]
    upper_s, shares = min(timed, key=lambda found: found[0], default=(inf, {}))
    return Bounds(lower_s=lower_seconds(problem, item), upper_s=upper_s, shares=shares)


def by_hand(problem: Problem, candidate: Candidate, memory: Memory) -> list[Shares]:
    """What does not fit is moved down, the one kind first or the other: those placements that then
    fit. To know them takes less than to price a candidate."""
    one, other = (filled(problem, candidate, memory, order) for order in permutations(KINDS))
    tried = [one] if one == other else [one, other]
    return [shares for shares in tried if _fits(problem, memory, shares)]


def filled(
    problem: Problem, candidate: Candidate, memory: Memory, order: Sequence[str] = KINDS
) -> Shares:
    """Shares where what does not fit on a level is moved down, kind by kind in that order. The
    lowest level may then hold more than it can."""
    shares: Shares = dict.fromkeys(candidate.variables, 0.0)
    for level in problem.hardware.levels:
        for kind in order:
            _move_down(problem, candidate, memory, shares, kind, level)
    return shares


def _fits(problem: Problem, memory: Memory, shares: Shares) -> bool:
    return all(
        taken.at(shares) <= problem.capacity_bytes(level) * (1 + 1e-9) + 1
        for level, taken in memory.items()
    )


def _move_down(
    problem: Problem,
    candidate: Candidate,
    memory: Memory,
    shares: Shares,
    kind: str,
    level: LevelName,
) -> None:
    """Moves as much of a kind from a level to the next one below as it is over its capacity."""
    levels = candidate.levels(kind)
    if level not in levels[:-1]:
        return
    taken = memory[level]
    excess = taken.at(shares) - problem.capacity_bytes(level)
    if excess <= 0:
        return
    below = levels[levels.index(level) + 1]
    here = shares.get((kind, level), 1 - sum(shares[kind, name] for name in levels[1:]))
    gained = taken.slopes.get((kind, level), 0.0) - taken.slopes.get((kind, below), 0.0)
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
    return seconds_per_sequence(item, filled(problem, item.candidate, memory, ("weights",)))


def _beside_least_cache(memory: Affine) -> Affine:
    """What experts take of a level, and the least that the cache may."""
    cache = (slope for (kind, _), slope in memory.slopes.items() if kind == "kv_cache")
    experts = {v: slope for v, slope in memory.slopes.items() if v[0] == "weights"}
    return Affine(constant=memory.constant + min(0.0, *cache, 0.0), slopes=experts)
