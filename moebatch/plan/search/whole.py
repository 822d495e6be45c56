"""From shares that a solver has found to whole layers of keys and values and whole experts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moebatch.layout.buffers import RESIDENT_TERM, SLOTS_TERM
from moebatch.layout.division import comes_in_pages, most_streamed
from moebatch.plan.problem import Problem
from moebatch.plan.search.bounds import seconds_under
from moebatch.plan.search.candidates import Candidate, Variable
from moebatch.plan.search.refusal import too_large
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Placement, Policy, whole


def whole_policy(
    problem: Problem, candidate: Candidate, shares: Mapping[Variable, float]
) -> Policy | None:
    """The fastest policy near these shares: layers of keys and values are rounded up or down, and
    experts fill the room that then is, from the level that computes them downwards.

    None if none of them fits.
    """
    found = [
        policy
        for cache in _whole_layers(problem, candidate, shares)
        if (policy := _with_experts(problem, candidate, cache)) is not None
    ]
    return min(found, key=lambda policy: seconds_under(problem, candidate, policy), default=None)


def _whole_layers(
    problem: Problem, candidate: Candidate, shares: Mapping[Variable, float]
) -> Iterator[Placement]:
    """Placements of whole layers that differ from the shares by less than one on all levels but
    the lowest."""
    *above, lowest = candidate.kv_levels
    number = problem.shape.num_keeping_layers
    wanted = candidate.placement("kv_cache", shares)
    choices: list[dict[LevelName, int]] = [{}]
    for level in above:
        least = whole(wanted.on(level), number)
        choices = [
            {**chosen, level: count}
            for chosen in choices
            for count in (least, least + 1)
            if sum(chosen.values()) + count <= number
        ]
    for chosen in choices:
        counts = {**chosen, lowest: number - sum(chosen.values())}
        yield _placement(counts, number)


def _with_experts(problem: Problem, candidate: Candidate, cache: Placement) -> Policy | None:
    """As many experts as fit on each level, the one that computes first."""
    shape, levels = problem.shape, candidate.weight_levels
    total = problem.num_experts
    empty = replace(
        candidate.policy, kv_cache=cache, weights=_placement({levels[-1]: total}, total)
    )
    policy = _with_residents(problem, empty, levels)
    if policy is None:
        return None
    if len(levels) == 3:
        policy = _with_middle(problem, policy, levels[1])
    if comes_in_pages(policy, problem.ladder):
        resident = round(policy.weights.on(levels[0]) * total)
        policy = replace(policy, num_slots=2 * most_streamed(shape, resident))
    elif policy.weights.on(levels[0]) == 1:
        policy = replace(policy, num_slots=0)
    return None if too_large(problem, policy) else policy


def _with_residents(
    problem: Problem, policy: Policy, levels: tuple[LevelName, ...]
) -> Policy | None:
    """Experts where they are computed, the rest on the next level below."""
    total = problem.num_experts
    if _room(problem, policy, levels[0]) >= total:
        resident = total
    elif len(levels) == 1:
        return None
    else:
        resident = most_residents(problem, policy)
    if resident < 0:
        return None
    counts = {levels[0]: resident, levels[-1]: total - resident}
    if len(levels) == 1:
        counts = {levels[0]: total}
    return replace(policy, weights=_placement(counts, total))


def most_residents(problem: Problem, policy: Policy) -> int:
    """Experts that can stay where they are computed, beside all else; negative if there is no room
    even for slots."""
    room = _room(problem, policy, problem.ladder.experts_at(policy))
    if comes_in_pages(policy, problem.ladder):
        return _beside_pages(problem, room)
    return room - policy.num_slots


def _beside_pages(problem: Problem, room: int) -> int:
    """Most residents that leave room for two halves of a buffer; -1 if there are none."""
    layers, experts = len(problem.shape.moe_layers), problem.shape.num_experts
    for in_each in range(experts - 1, -1, -1):
        resident = min(in_each * layers + layers - 1, room - 2 * (experts - in_each))
        if resident >= in_each * layers:
            return resident
    return -1


def _with_middle(problem: Problem, policy: Policy, level: LevelName) -> Policy:
    """Experts of the lowest level that fit into main memory between; those that then are left
    below need slots there."""
    total = problem.num_experts
    on_disk = round(policy.weights.disk * total)
    above = total - on_disk
    moved = _room(problem, policy, level)
    if moved < on_disk:
        moved = max(0, moved - _slots_below(problem, policy))
    counts: dict[LevelName, int] = {
        "vram": above,
        level: min(moved, on_disk),
        "disk": on_disk - min(moved, on_disk),
    }
    return replace(policy, weights=_placement(counts, total))


def with_rest_below(problem: Problem, policy: Policy) -> Policy:
    """The same experts on a GPU, and of the others as many as have room in main memory; unchanged
    where none of them is on disk."""
    if problem.ladder.top != "vram" or not policy.weights.disk:
        return policy
    resident = policy.weights.vram
    below = replace(policy, weights=Placement(vram=resident, disk=1 - resident))
    return _with_middle(problem, below, "dram")


def _slots_below(problem: Problem, policy: Policy) -> int:
    if not comes_in_pages(policy, problem.ladder):
        return policy.num_slots
    return 2 * most_streamed(problem.shape, round(policy.weights.vram * problem.num_experts))


def _room(problem: Problem, policy: Policy, level: LevelName) -> int:
    """Experts and slots for which a level has room beside everything else."""
    footprint = problem.footprints(policy)[level]
    of_experts = sum(footprint.terms.get(term, 0) for term in (RESIDENT_TERM, SLOTS_TERM))
    room = problem.capacity_bytes(level) - footprint.total_bytes + of_experts
    return room // problem.memory.expert_sizes[level]


def _placement(counts: Mapping[LevelName, int], number: int) -> Placement:
    return Placement(**{level: count / number for level, count in counts.items()})
