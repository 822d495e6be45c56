"""Policies whose cache of keys and values is as wide as there is room for."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from moebatch.layout.buffers import CachePages
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
    longest sequence have none."""
    memory = problem.memory
    division = Division.of(problem.shape, memory.groups, policy, problem.ladder)
    beside = memory.beside_cache(policy, division)
    kinds = [*memory.cache_pages(policy, division)]
    for level in problem.hardware.levels:
        room = problem.capacity_bytes(level) - beside[level].total_bytes
        most = _pages_within(room, [each for each in kinds if each.level == level], most)
    return most if most >= problem.fewest_pages else 0


def _pages_within(room: int, kinds: Sequence[CachePages], most: int) -> int:
    """The same on a level where so many bytes are left. The more pages there are, the less another
    one takes, since pages of each kind are no more than some number."""
    pages, taken = 0, 0.0
    growth = sum(each.layers * each.page_bytes for each in kinds)
    for each in sorted(kinds, key=lambda each: each.most_pages):
        end = min(each.most_pages, most)
        if room - taken < growth * (end - pages):
            return pages + int((room - taken) // growth)
        taken += growth * (end - pages)
        growth -= each.layers * each.page_bytes
        pages = end
    return most if room >= taken else 0


def _without_idle_places(problem: Problem, policy: Policy) -> Policy:
    """No more sequences, all alike, than the pages hold at any time."""
    most = ceil(sequences_held(problem.workload, policy.num_kv_pages) * _BESIDE)
    return with_batch(policy, min(policy.batch_size, most))
