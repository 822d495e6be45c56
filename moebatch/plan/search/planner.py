"""The way from a problem to a policy."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import merge
from math import inf

from moebatch.errors import DoesNotFit
from moebatch.layout.division import comes_in_pages
from moebatch.layout.footprint import dense_bytes, slot_bytes
from moebatch.plan.problem import Problem
from moebatch.plan.replay.phases import sequences_held
from moebatch.plan.runnable import require_schedule
from moebatch.plan.search.affine import AffineCandidate
from moebatch.plan.search.bounds import (
    Bounds,
    Memory,
    bounds,
    by_hand,
    least_with_room,
    seconds_under,
)
from moebatch.plan.search.candidates import FEWEST_SLOTS, Candidate, candidates
from moebatch.plan.search.known import Known
from moebatch.plan.search.milp import NoSolution, Solution, solve, violations
from moebatch.plan.search.ranking import Ranked, Ranking, ranked_among
from moebatch.plan.search.refine import refined
from moebatch.plan.search.refusal import refusal
from moebatch.plan.search.whole import whole_policy
from moebatch.spec.policy.policy import STREAMING_SLOTS, Policy

MOST_CANDIDATES = 48
"""So many are handed to the solver, the most promising ones."""
FEW_SLOTS_COST = 1.05
"""What it costs to have the fewest slots, measured with three."""
_DEAR_SHARE = 0.02
_DEAR_LAYERS = 0.5
"""Share of a level; what takes less leaves the cache and experts enough room."""
_MANY_TIMES, _CLOSE = 4, 1.1
"""A candidate with so many times as many sequences, which takes no longer than this, is a rival."""
_ROUNDING_LOSS = 1.01
"""Rounding that costs no more than this is not worth another candidate."""
_ROUNDING = 1 + 1e-9
"""That far two ways to add up the same may be apart."""
_HARDLY_WORSE = 1.001
"""More than what breaks ties among candidates is worth."""
NEAR = 1.25
"""A candidate that cannot come nearer to the best one than this is not looked at again."""


Screened = tuple[AffineCandidate, Bounds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A policy and how it was found."""

    policy: Policy
    """Whole experts, and whole layers of keys and values; the best of its neighbours."""
    token_s: float
    """Seconds per token under it, by a replay of a part of the job."""
    solution: Solution
    candidates: tuple[AffineCandidate, ...]
    """Those that it was found among."""
    ranked: Ranking
    """All of them that could come near it."""
    known: Known
    """What has been worked out about them."""


def best_policy(problem: Problem, known: Known | None = None) -> Planned:
    """The policy that finishes the job first; `known` is what has been worked out for the problem
    already. Raises DoesNotFit, and ConfigError for a schedule that the model does not go with."""
    require_schedule(problem)
    known = known or Known(problem)
    if not _layers_are_dear(problem):
        return _with_cache_placed(problem, known)
    coming = replace(problem, streamed_layers=problem.most_streamed_layers)
    found = []
    for one in (problem, coming):
        with suppress(DoesNotFit):
            found.append(_with_cache_placed(one, known if one is problem else Known(one)))
    if not found:
        raise refusal(coming)
    return min(found, key=lambda planned: planned.token_s)


def _layers_are_dear(problem: Problem) -> bool:
    """Whether weights outside experts take so much of the level that computes that it may be better
    to bring those of each layer in every pass."""
    capacity_bytes = problem.capacity_bytes(problem.ladder.top)
    takes = dense_bytes(problem.shape, problem.dtypes) > _DEAR_LAYERS * capacity_bytes
    return takes and problem.most_streamed_layers > 0


def _with_cache_placed(problem: Problem, known: Known) -> Planned:
    if problem.keeps_kv_on_disk and not problem.kv_beside_weights:
        with suppress(DoesNotFit):
            return _searched(replace(problem, kv_on_disk=False), known)
    return _searched(problem, known)


def _searched(problem: Problem, known: Known) -> Planned:
    ranked = ranked_among(known, candidates(problem, slots=STREAMING_SLOTS))
    screened = screen(problem, ranked, known)
    if not screened or _slots_are_dear(problem):
        best_s = best_seconds(screened)
        few = [*_with_fewest_slots(problem, ranked, best_s * NEAR)]
        screened = merged(screened, screen(problem, few, known, best_s=best_s))
        ranked = Ranking(merge(ranked, few, key=lambda pair: pair[0]))
    if not screened:
        raise refusal(problem)
    near = screened[:MOST_CANDIDATES]
    solution = _solved(problem, near)
    rounded = _rounded(problem, solution, screened)
    token_s, policy = refined(problem, known, rounded, *_rivals(problem, rounded, screened))
    return Planned(
        policy=policy,
        token_s=token_s,
        solution=solution,
        candidates=tuple(item for item, _ in near),
        ranked=ranked,
        known=known,
    )


def _rounded(problem: Problem, solution: Solution, screened: Sequence[Screened]) -> Policy:
    """The solution with whole layers and experts; where that costs much, as it may where there are
    few of them, another candidate if it is faster when rounded."""
    own = solution.chosen.candidate
    policy = whole_policy(problem, own, solution.shares)
    assert policy is not None, "shares leave room for rounding"
    best, best_s = policy, seconds_under(problem, own, policy)
    if best_s <= solution.seconds_per_sequence * _ROUNDING_LOSS:
        return best
    for item, limits in screened[:MOST_CANDIDATES]:
        if limits.lower_s < best_s:
            other = whole_policy(problem, item.candidate, limits.shares)
            other_s = seconds_under(problem, item.candidate, other) if other else best_s
            if other is not None and other_s < best_s:
                best, best_s = other, other_s
    return best


def _rivals(problem: Problem, policy: Policy, screened: Sequence[Screened]) -> Iterator[Policy]:
    """The most promising policy of every other way to compute, or to keep keys and values: what
    busy times say of one way, and of another, is not equally near to a job. And of the same way the
    one with the most sequences that comes close, if those are many times as many: no climb leads
    from few beside many experts to many."""
    own = _way(policy, keeps_on_disk=policy.kv_cache.disk > 0)
    close_s = best_seconds(screened) * _CLOSE
    chosen: dict[Hashable, Screened] = {}
    many = _held(problem, policy) * _MANY_TIMES
    for item, limits in screened:
        other = item.candidate.policy
        way = _way(other, keeps_on_disk=limits.shares.get(("kv_cache", "disk"), 0.0) > 0)
        held = _held(problem, other)
        if way != own:
            chosen.setdefault(way, (item, limits))
        elif held >= many and limits.upper_s <= close_s:
            chosen[way], many = (item, limits), held
    for item, limits in chosen.values():
        rival = whole_policy(problem, item.candidate, limits.shares)
        if rival is not None:
            yield rival


def _way(policy: Policy, *, keeps_on_disk: bool) -> tuple[str, bool, bool, bool]:
    return policy.schedule, policy.attention_on_gpu, policy.ffn_on_gpu, keeps_on_disk


def _held(problem: Problem, policy: Policy) -> float:
    return min(policy.batch_size, sequences_held(problem.workload, policy.num_kv_pages))


def best_seconds(screened: Sequence[Screened]) -> float:
    """Seconds per sequence of the best placement found by hand; infinite if there is none."""
    return min((limits.upper_s for _, limits in screened), default=inf)


def _with_fewest_slots(problem: Problem, ranked: Ranking, enough_s: float) -> Iterator[Ranked]:
    """Candidates whose experts stream one by one, with as few slots as will do, in the same order,
    as what that costs is the same for all; those that might take no longer than `enough_s`."""
    slots = min(FEWEST_SLOTS, problem.num_experts)
    for least_s, candidate in ranked:
        if least_s * FEW_SLOTS_COST > enough_s:
            return
        policy = candidate.policy
        if policy.num_slots and not comes_in_pages(policy, problem.ladder):
            slower = candidate.slower(FEW_SLOTS_COST, num_slots=slots)
            yield least_s * FEW_SLOTS_COST, slower


def _slots_are_dear(problem: Problem) -> bool:
    """Whether slots take so much of a level that fewer of them may be the better bargain."""
    level = problem.hardware.vram or problem.hardware.dram
    more = (STREAMING_SLOTS - FEWEST_SLOTS) * slot_bytes(problem.shape, problem.dtypes)
    return more > _DEAR_SHARE * level.capacity_bytes


def _solved(problem: Problem, screened: Sequence[Screened]) -> Solution:
    """The solver's answer if it has one that holds, else the best placement found by hand. Those
    that cannot be better than that are not handed to the solver."""
    first, by_hand = screened[0]
    enough_s = by_hand.upper_s * _HARDLY_WORSE
    items = [item for item, limits in screened if limits.lower_s <= enough_s]
    try:
        solution = solve(problem, items, unit_s=by_hand.upper_s)
    except NoSolution as error:
        solver, reasons = str(error), ["no solution"]
    else:
        solver, reasons = solution.solver, violations(problem, solution)
    if not reasons:
        return solution
    return Solution(
        chosen=first,
        shares=by_hand.shares,
        seconds_per_sequence=by_hand.upper_s,
        solver=f"by hand ({solver}: {'; '.join(reasons)})",
    )


def screen(
    problem: Problem,
    ranked: Iterable[Ranked],
    known: Known,
    *,
    best_s: float = inf,
    near: float = NEAR,
) -> list[Screened]:
    """Candidates that may be the best or come close to it, and to the `best_s` that is known
    already; most promising first."""
    found: list[Screened] = []
    roomy: set[Policy] = set()
    floors: dict[Hashable, float] = {}  # of candidates that differ in levels alone
    for least_s, candidate in ranked:
        if least_s > best_s * near:
            break
        if candidate.uses_disk and candidate.policy in roomy:
            continue
        key = candidate.policy, candidate.phases
        if key not in floors:
            floors[key] = least_with_room(problem, known, candidate)
        if floors[key] > best_s * near * _ROUNDING:
            continue
        memory = known.memory(candidate)
        if not candidate.uses_disk and _holds_all(problem, candidate, memory):
            roomy.add(candidate.policy)
        placements = by_hand(problem, candidate, memory)
        if not placements:
            continue
        item = known.affine(candidate)
        limits = bounds(problem, item, placements)
        if limits.upper_s < inf:
            best_s = min(best_s, limits.upper_s)
            found.append((item, limits))
    return merged(found)


def _holds_all(problem: Problem, candidate: Candidate, memory: Memory) -> bool:
    """Whether main memory has room for all that may leave the GPU, so that no disk is needed."""
    in_memory = {variable: float(variable[1] == "dram") for variable in candidate.variables}
    return "dram" in candidate.kv_levels and memory["dram"].at(in_memory) <= problem.capacity_bytes(
        "dram"
    )


def merged(*screened: Sequence[Screened]) -> list[Screened]:
    """Those of all that may come close to the best, most promising first."""
    found = [pair for some in screened for pair in some]
    best_s = best_seconds(found)
    near = [pair for pair in found if pair[1].lower_s <= best_s * NEAR]
    return sorted(near, key=lambda pair: (pair[1].upper_s, pair[1].lower_s))
