"""Policies whose cache of keys and values is as wide as there is room for."""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from moebatch.layout.buffers import CACHE_TERMS
from moebatch.layout.division import Division
from moebatch.plan.problem import Problem
from moebatch.plan.replay.phases import sequences_held
from moebatch.plan.search.neighbours import each_once, with_all_pages, with_batch
from moebatch.spec.policy.policy import Policy

_BESIDE = 1.1
"""Places for so many more sequences than are held in the mean."""


def widened(problem: Problem, policies: Iterable[Policy]) -> list[Policy]:
    """Each with the widest cache, if it fits at all."""
    found = (with_widest_cache(problem, policy) for policy in policies)
    return each_once(*(policy for policy in found if policy is not None))


def with_widest_cache(problem: Problem, policy: Policy) -> Policy | None:
    """As many pages as fit, and no more than the batch can use; None if too few fit."""
    pages = _pages_with_room(problem, policy, with_all_pages(problem, policy).num_kv_pages)
    if not pages:
        return None
    widest = replace(policy, num_kv_pages=pages)
    return widest if problem.workload.lengths else _without_idle_places(problem, widest)


def _pages_with_room(problem: Problem, policy: Policy, most: int) -> int:
    """Pages, up to so many, for which every level has room beside all else; 0 where those of the
    longest sequence have none. The more there are, the less another one takes, since windows are
    as large as a micro-batch needs at some time: what one takes at either end bounds how many fit
    (Newton's method, from below)."""

    division = Division.of(problem.shape, problem.memory.groups, policy, problem.ladder)
    beside = {
        level: problem.capacity_bytes(level)
        - sum(taken for term, taken in footprint.terms.items() if term not in CACHE_TERMS)
        for level, footprint in problem.footprints(policy, division).items()
    }

    def room_left(pages: int) -> list[int]:
        paged = replace(policy, num_kv_pages=pages)
        caches = problem.memory.cache_footprints(paged, division)
        return [room - caches[level].total_bytes for level, room in beside.items()]

    fewest, lacking = problem.fewest_pages, room_left(most)
    if min(lacking) >= 0:
        return most
    if fewest >= most:
        return 0
    growth = zip(lacking, room_left(most - 1), strict=True)
    fewer = (
        ceil(-lack / (less - lack)) if less > lack else most for lack, less in growth if lack < 0
    )
    pages = max(fewest, most - max(fewer))
    while min(left := room_left(pages)) >= 0:
        growth = zip(left, room_left(pages + 1), strict=True)
        further = min(room // (room - less) for room, less in growth if less < room)
        if not further:
            return pages
        pages += further
    return 0


def _without_idle_places(problem: Problem, policy: Policy) -> Policy:
    """No more sequences, all alike, than the pages hold at any time."""
    most = ceil(sequences_held(problem.workload, policy) * _BESIDE)
    return with_batch(policy, min(policy.batch_size, most))
