"""Checks an answer of the solver against cost and footprint themselves, not their coefficients."""

from collections.abc import Iterator, Mapping
from math import isclose, isfinite

from moebatch.plan.affine import Variable, footprints_in_parts, placement
from moebatch.plan.bounds import seconds_under
from moebatch.plan.milp import Solution
from moebatch.plan.problem import Problem

_SHARE_TOLERANCE = 1e-6
_MEMORY_TOLERANCE = 1e-6
_TIME_TOLERANCE = 1e-4


def violations(problem: Problem, solution: Solution) -> list[str]:
    """What is wrong with a solution, in words; empty if nothing is."""
    found = list(_share_violations(solution.shares))
    if found:
        return found
    candidate = solution.chosen.candidate
    policy = candidate.placed(
        placement(candidate, "weights", solution.shares),
        placement(candidate, "kv_cache", solution.shares),
    )
    for level, footprint in footprints_in_parts(problem, candidate, policy).items():
        capacity = problem.capacity_bytes(level)
        if footprint.total_bytes > capacity * (1 + _MEMORY_TOLERANCE):
            found.append(f"{level}: {footprint.total_bytes} bytes of {capacity}")
    seconds = seconds_under(problem, candidate, policy)
    if not isfinite(seconds):
        found.append("takes for ever")
    elif not isclose(seconds, solution.seconds_per_sequence, rel_tol=_TIME_TOLERANCE):
        found.append(f"takes {seconds} s per sequence, not {solution.seconds_per_sequence}")
    return found


def _share_violations(shares: Mapping[Variable, float]) -> Iterator[str]:
    for (kind, level), share in shares.items():
        if not -_SHARE_TOLERANCE <= share <= 1 + _SHARE_TOLERANCE:
            yield f"{kind} on {level}: a share of {share}"
    for kind in ("weights", "kv_cache"):
        total = sum(share for (of, _), share in shares.items() if of == kind)
        if total > 1 + _SHARE_TOLERANCE:
            yield f"{kind}: shares below sum to {total}"
