"""What a policy asks for that a run cannot do."""

from collections.abc import Iterator

from moebatch.layout.setup import cache_fault
from moebatch.plan.problem import Problem
from moebatch.schedule.registry import traits_of
from moebatch.spec.policy import Policy

_NO_GPU = "this run has no GPU; set it to"


def not_runnable(
    problem: Problem, policy: Policy, *, is_plain: bool = False
) -> Iterator[tuple[str, str]]:
    """Keys of a policy, and what is wrong with them.

    Args:
        is_plain: everything is done one after the other, in main memory.
    """
    if problem.with_vram:
        yield from _beside_gpu(policy)
    else:
        yield from _without_gpu(policy)
    if policy.kv_cache.disk:
        yield from _cache_on_disk(problem, is_plain=is_plain)
    fault = cache_fault(problem.shape, policy, problem.ladder)
    if fault is not None:
        yield "cache_sizes", fault
    if policy.batching != "mixed":
        advice = "write mixed, and compare with moebatch run --static"
        yield "batching", f"a run refills places as they come free; {advice}"
    home = policy.weights.vram if problem.with_vram else policy.weights.dram
    if policy.num_slots == 0 and home < 1 and not traits_of(policy).is_paged:
        where = "below the GPU" if problem.with_vram else "on disk"
        yield "num_slots", f"experts {where} need slots to stream through"


def _beside_gpu(policy: Policy) -> Iterator[tuple[str, str]]:
    if not policy.ffn_on_gpu:
        yield "ffn_on_gpu", "experts are computed on the GPU; set it to true"


def _without_gpu(policy: Policy) -> Iterator[tuple[str, str]]:
    for name in ("attention_on_gpu", "ffn_on_gpu"):
        if getattr(policy, name):
            yield name, f"{_NO_GPU} false"
    for name in ("weights", "kv_cache"):
        if getattr(policy, name).vram:
            yield f"{name}.vram", f"{_NO_GPU} 0"


def _cache_on_disk(problem: Problem, *, is_plain: bool) -> Iterator[tuple[str, str]]:
    if is_plain:
        yield "kv_cache.disk", "--sync keeps keys and values in main memory; set it to 0"
    elif "dram->disk" not in problem.hardware.links:
        name = problem.hardware.name
        yield "kv_cache.disk", f"the profile {name} has no link dram->disk; set it to 0"
