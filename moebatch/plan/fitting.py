"""A policy made to fit the schedule that it is run with."""

from dataclasses import replace
from math import ceil

from moebatch.errors import DoesNotFit
from moebatch.plan.problem import Problem
from moebatch.plan.search.candidates import widest_micro_batch
from moebatch.plan.search.refusal import too_large
from moebatch.schedule.registry import traits_of
from moebatch.spec.policy.policy import Placement, Policy


def policy_for(policy: Policy, schedule: str, problem: Problem) -> Policy:
    """The policy with another schedule: attention and micro-batches as that one wants them. With
    its own, micro-batches stay as wide as they are."""
    changed = replace(policy, schedule=schedule)
    traits = traits_of(changed)
    if schedule != policy.schedule:
        most = widest_micro_batch(traits, policy.batch_size)
        changed = replace(changed, micro_batch_size=min(policy.micro_batch_size, most))
    if traits.is_paged:
        changed = replace(changed, cache="static", cache_sizes=())
    on_gpu = policy.attention_on_gpu if traits.attention is None else traits.attention == "gpu"
    if problem.ladder.top != "vram" or on_gpu == policy.attention_on_gpu:
        return changed
    cache = policy.kv_cache
    below = Placement(dram=cache.dram + cache.vram, disk=cache.disk)
    return replace(changed, attention_on_gpu=on_gpu, kv_cache=cache if on_gpu else below)


def with_room(problem: Problem, policy: Policy) -> Policy:
    """The policy with slots for the two halves of a buffer that a paged schedule has anyway."""
    if not traits_of(policy).is_paged:
        return policy
    wanted = problem.placed(policy).slots_wanted
    return replace(policy, num_slots=max(policy.num_slots, wanted))


def fitted(problem: Problem, policy: Policy) -> Policy:
    """The same, with fewer experts where they are computed if they leave no room otherwise, and
    more of them on disk where main memory has none for those that leave the GPU, or for those on
    it, which live below it as well where they change.

    Raises DoesNotFit if none of them would leave enough.
    """
    step = len(problem.shape.moe_layers)
    num_resident = problem.num_resident(policy)
    while True:
        roomy = _with_room_below(problem, with_room(problem, policy))
        excess = too_large(problem, roomy)
        if excess is None:
            return roomy
        if num_resident == 0:
            raise DoesNotFit(f"schedule {policy.schedule}: {excess}\n{_advice(problem, roomy)}")
        num_resident = max(0, num_resident - step)
        policy = replace(problem.with_residents(policy, num_resident), cache_sizes=())


def _with_room_below(problem: Problem, policy: Policy) -> Policy:
    """The policy with so many experts on disk, not in main memory below a GPU, that all else has
    room there; unchanged where it has, or there is no disk. Where all are on the GPU, none of them
    has to change."""
    overfull = problem.overfull(policy).get("dram")
    if overfull is None or problem.ladder.experts_at(policy) != "vram":
        return policy
    weights = policy.weights
    if weights.vram == 1:
        return replace(policy, cache="static", cache_sizes=())
    if not problem.has_disk or not weights.dram:
        return policy
    excess = overfull.total_bytes - problem.capacity_bytes("dram")
    num_moved = ceil(excess / problem.memory.expert_sizes["dram"])
    below = 1 - weights.vram
    disk = min(below, weights.disk + num_moved / problem.num_experts)
    moved = replace(policy, weights=Placement(vram=weights.vram, dram=below - disk, disk=disk))
    return _with_room_below(problem, moved)  # which has slots in main memory, if it had none before


def _advice(problem: Problem, policy: Policy) -> str:
    lives_twice = policy.cache != "static" and problem.ladder.experts_at(policy) == "vram"
    less = ""
    if lives_twice and "dram" in problem.overfull(policy):
        less = "take experts.cache: static, which needs less main memory, "
    return f"raise these budgets, {less}or take another schedule"


def slot_notes(problem: Problem, policy: Policy) -> tuple[str, ...]:
    """What a schedule does otherwise than its paper says, for want of slots."""
    wanted = problem.placed(policy).slots_wanted
    if policy.num_slots >= wanted:
        return ()
    return (
        f"{policy.schedule} wants {wanted} slots to work as its paper says; the policy has "
        f"{policy.num_slots}, so what does not fit comes later, or again for every micro-batch",
    )
