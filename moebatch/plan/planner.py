"""The way from a problem to a policy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moebatch.plan.affine import AffineCandidate, Variable, affine, placement
from moebatch.plan.bounds import Bounds, bounds, least_seconds
from moebatch.plan.candidates import FEWEST_SLOTS, Candidate, candidates
from moebatch.plan.footprint import slot_bytes
from moebatch.plan.milp import NoSolution, Solution, solve
from moebatch.plan.problem import Problem
from moebatch.plan.refusal import refusal, too_large
from moebatch.plan.verify import violations
from moebatch.spec.hardware import LevelName
from moebatch.spec.policy import STREAMING_SLOTS, Placement, Policy

MOST_CANDIDATES = 48
"""So many are handed to the solver, the most promising ones."""
FEW_SLOTS_COST = 1.05
"""What it costs to have the fewest slots, measured with three."""
_DEAR_SHARE = 0.02
NEAR = 1.25
"""A candidate that cannot come nearer to the best one than this is not looked at again."""


Ranked = Sequence[tuple[float, Candidate]]
"""Candidates with the least that they can take, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A policy and how it was found."""

    policy: Policy
    """Whole experts."""
    solution: Solution
    candidates: tuple[AffineCandidate, ...]
    """Those that the solver saw."""
    ranked: Ranked
    """All of them."""


def best_policy(problem: Problem) -> Planned:
    """The policy that finishes the job first. Raises DoesNotFit."""
    ranked = ranked_candidates(problem, slots=STREAMING_SLOTS)
    screened = screen(problem, ranked)
    if not screened or _slots_are_dear(problem):
        few = _with_fewest_slots(problem, ranked)
        screened_few = screen(problem, few)
        if best_seconds(screened_few) < best_seconds(screened):
            ranked, screened = few, screened_few
    if not screened:
        raise refusal(problem)
    items = tuple(item for item, _ in screened[:MOST_CANDIDATES])
    solution = _solved(problem, items, screened[0][1])
    return Planned(
        policy=whole_units(problem, solution.chosen.candidate, solution.shares),
        solution=solution,
        candidates=items,
        ranked=ranked,
    )


def best_seconds(screened: Sequence[tuple[AffineCandidate, Bounds]]) -> float:
    """Seconds per sequence of the best placement found by hand; infinite if there is none."""
    return min((limits.upper_s for _, limits in screened), default=float("inf"))


def _with_fewest_slots(problem: Problem, ranked: Ranked) -> Ranked:
    """The same candidates with as few slots as will do, in the same order, as what that costs is
    the same for all."""
    slots = min(FEWEST_SLOTS, problem.num_experts)
    return [
        (least_s * FEW_SLOTS_COST, candidate.slower(FEW_SLOTS_COST, num_slots=slots))
        for least_s, candidate in ranked
        if candidate.policy.num_slots
    ]


def _slots_are_dear(problem: Problem) -> bool:
    """Whether slots take so much of a level that fewer of them may be the better bargain."""
    level = problem.hardware.vram or problem.hardware.dram
    more = (STREAMING_SLOTS - FEWEST_SLOTS) * slot_bytes(problem.shape, problem.dtypes)
    return more > _DEAR_SHARE * level.capacity_bytes


def _solved(problem: Problem, items: Sequence[AffineCandidate], by_hand: Bounds) -> Solution:
    """The solver's answer if it has one that holds, else the best placement found by hand."""
    try:
        solution = solve(problem, items, unit_s=by_hand.upper_s)
    except NoSolution as error:
        solver, reasons = str(error), ["no solution"]
    else:
        solver, reasons = solution.solver, violations(problem, solution)
    if not reasons:
        return solution
    return Solution(
        chosen=items[0],
        shares=by_hand.shares,
        seconds_per_sequence=by_hand.upper_s,
        solver=f"by hand ({solver}: {'; '.join(reasons)})",
    )


def ranked_candidates(problem: Problem, *, slots: int) -> Ranked:
    """All candidates by what they would take if everything were where it is computed; that does
    not depend on capacities."""
    return ranked_among(problem, candidates(problem, slots=slots))


def ranked_among(problem: Problem, some: Iterable[Candidate]) -> Ranked:
    """Some candidates in the same order."""
    return sorted(((least_seconds(problem, c), c) for c in some), key=lambda pair: pair[0])


def screen(problem: Problem, ranked: Ranked) -> list[tuple[AffineCandidate, Bounds]]:
    """Candidates that may be the best or come close, most promising first."""
    found: list[tuple[AffineCandidate, Bounds]] = []
    best_s = float("inf")
    for least_s, candidate in ranked:
        if least_s > best_s * NEAR:
            break
        item = affine(problem, candidate)
        limits = bounds(problem, item)
        if limits.upper_s < float("inf"):
            best_s = min(best_s, limits.upper_s)
            found.append((item, limits))
    near = [pair for pair in found if pair[1].lower_s <= best_s * NEAR]
    return sorted(near, key=lambda pair: (pair[1].upper_s, pair[1].lower_s))


def whole_units(problem: Problem, candidate: Candidate, shares: Mapping[Variable, float]) -> Policy:
    """The policy with whole experts and whole pages: what is left of one on a level moves to the
    next below, as long as that is not too much for it."""
    for carry in (True, False):
        weights = _whole(
            placement(candidate, "weights", shares),
            candidate.weight_levels,
            problem.num_experts,
            carry=carry,
        )
        cache = _whole(
            placement(candidate, "kv_cache", shares),
            candidate.kv_levels,
            candidate.policy.num_kv_pages,
            carry=carry,
        )
        policy = candidate.placed(weights, cache)
        if too_large(problem, policy) is None:
            break
    nothing_streams = policy.weights.on(candidate.weight_levels[0]) == 1
    return replace(policy, num_slots=0) if nothing_streams else policy


def _whole(
    shares: Placement, levels: Sequence[LevelName], num_units: int, *, carry: bool
) -> Placement:
    """The nearest whole units by level, the lowest level taking what is left."""
    counts: dict[LevelName, int] = {}
    left, rest = num_units, 0.0
    for level in levels[:-1]:
        exact = shares.on(level) * num_units + (rest if carry else 0.0)
        counts[level] = min(left, int(exact + 1e-6))
        rest = exact - counts[level]
        left -= counts[level]
    counts[levels[-1]] = left
    return Placement(**{level: count / num_units for level, count in counts.items()})
