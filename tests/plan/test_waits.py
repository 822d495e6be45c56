"""A pass whose lanes wait for each other takes as long as the planner says."""

from dataclasses import replace

import pytest

from moebatch.layout.load import PassLoad
from moebatch.layout.routing import SkewedRouting
from moebatch.plan.options import Work
from moebatch.plan.problem import Problem
from moebatch.plan.simulation.passes import decode_load, mean_load, split
from moebatch.plan.simulation.world import SimWorld
from moebatch.schedule.drivers.simulate import simulate
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.policy import Placement, Policy
from tests.plan.problems import GB, WORKLOAD, cpu_machine, gpu_machine, launching, problem

ON_GPU = problem(launching(gpu_machine(disk=20 * GB)))
SLOW_DISK = problem(launching(gpu_machine(disk=GB)))
_SWITCH = load_model("switch-base-8").shape
ENCODING = problem(launching(gpu_machine()), shape=_SWITCH, workload=_SWITCH.cached(WORKLOAD))
BELOW, ALL, SOME = Placement(dram=1), Placement(vram=1), Placement(vram=0.75, dram=0.25)


def policy(schedule: str, count: float, size: int = 128, **changes: object) -> Policy:
    """So many micro-batches of a size; all experts and the cache in main memory."""
    values: dict[str, object] = {
        "batch_size": round(count * size),
        "micro_batch_size": size,
        "tokens_per_pass": round(4 * count * size),
        "num_slots": 16,
        "num_kv_pages": 10_000,
        "weights": BELOW,
        "kv_cache": BELOW,
        "attention_on_gpu": False,
        "ffn_on_gpu": True,
        "schedule": schedule,
    }
    return Policy(**{**values, **changes})  # type: ignore[arg-type]


CPU = {"ffn_on_gpu": False}
GPU = {"attention_on_gpu": True}
CASES: dict[str, tuple[Problem, Policy, Work]] = {
    "pages of one micro-batch are staged and go up in turns": (
        ON_GPU,
        policy("cgopipe", 1, staging=True),
        "decode",
    ),
    "a cache on disk in some layers": (
        SLOW_DISK,
        policy("cgopipe", 8, weights=ALL, kv_cache=Placement(dram=0.75, disk=0.25)),
        "decode",
    ),
    "pages of experts on the disk that has the cache as well": (
        SLOW_DISK,
        policy(
            "cgopipe",
            4,
            weights=Placement(dram=0.75, disk=0.25),
            kv_cache=Placement(dram=0.5, disk=0.5),
        ),
        "decode",
    ),
    "hidden states wait for a layer in one piece": (ON_GPU, policy("fastdecode", 4, 512), "decode"),
    "nothing hides the cache of the first micro-batch": (
        ON_GPU,
        policy("flexgen", 1, 1024, weights=ALL, **GPU),
        "decode",
    ),
    "a block comes beside the first of several micro-batches": (
        ON_GPU,
        policy("flexgen_c", 1, 256, weights=SOME, tokens_per_pass=8192),
        "mean",
    ),
    "a CPU attends to all before experts come one by one": (
        ON_GPU,
        policy("hot", 4, 512, weights=Placement(vram=0.9, dram=0.1), num_slots=8),
        "decode",
    ),
    "slots are held until the last micro-batch": (
        ON_GPU,
        policy("hot", 6, 1024, num_slots=8, **GPU, kv_cache=ALL),
        "decode",
    ),
    "few slots while experts that stay are computed": (
        ON_GPU,
        policy("klotski", 1, 2048, weights=SOME, num_slots=1, kv_cache=ALL, **GPU),
        "decode",
    ),
    "whole layers in slots for one": (ON_GPU, policy("multi", 4, 512, num_slots=8), "decode"),
    "fewer slots than experts of a layer": (ON_GPU, policy("hot", 4, 64, num_slots=4), "decode"),
    "few of a layer's experts in each of many micro-batches": (
        ON_GPU,
        policy("hot", 8, 4, num_slots=6, kv_cache=ALL, **GPU),
        "decode",
    ),
    "slots for all experts but one": (
        ON_GPU,
        policy("multi", 3, 1024, num_slots=7, kv_cache=ALL, **GPU),
        "decode",
    ),
    "what was foreseen leaves for what is asked for in its turn": (
        ON_GPU,
        policy("promoe_prefetch", 3, 1024, num_slots=6, kv_cache=ALL, **GPU),
        "decode",
    ),
    "nothing is foreseen": (ON_GPU, policy("ondemand", 4, 512), "decode"),
    "nothing is foreseen, and each expert waits for its turn": (
        problem(cpu_machine(64, flops=4e12)),
        policy("promoe_base", 1, 2048, weights=Placement(disk=1), **CPU),
        "decode",
    ),
    "the cache of a micro-batch that walks alone": (
        problem(cpu_machine(64, flops=8e12)),
        policy("simple", 2, 512, num_slots=0, kv_cache=Placement(disk=1), **CPU),
        "decode",
    ),
    "experts hide the cache of the first micro-batch": (
        ON_GPU,
        policy("klotski", 1, 1024, weights=ALL, num_slots=0, **GPU),
        "decode",
    ),
    "experts of a small rest are as many": (
        ON_GPU,
        policy("hot", 1.1, 320, weights=ALL, kv_cache=ALL, **GPU),
        "decode",
    ),
}


CASES |= {
    f"passes without prompts leave an encoder out: {name}": (
        ENCODING,
        policy(name, 4, 64, num_slots=12, kv_cache=ALL, **GPU),
        "decode",
    )
    for name in ("simple", "flexgen", "cgopipe", "fastdecode")
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CASES)
def test_a_pass_waits_as_long_as_the_planner_says(name: str) -> None:
    _is_held(*CASES[name])


def test_prompts_beside_sequences_that_decode_hide_the_weights_of_the_next_layer() -> None:
    """Of Mixtral-8x7B on a T4: link and GPU both are busy nearly all the time."""
    of, load = _released("mixtral-8x7b", "t4"), _beside_prompts(1030, 10)
    under = policy("cgopipe", 3, 512, tokens_per_pass=6144, num_kv_pages=51_000)
    cost, simulated_s = of.cost_of(load, under), _simulated_s(of, under, load)
    assert cost.seconds == pytest.approx(simulated_s, rel=0.05)
    assert simulated_s <= 1.05 * max(cost.lanes.values())


def test_a_cpu_attends_to_the_third_micro_batch_when_prompts_are_done() -> None:
    """Of DeepSeek-V2-Lite on an RTX 4090, where CPU and GPU are busy for about as long."""
    of, load = _released("deepseek-v2-lite", "rtx4090"), _beside_prompts(1725, 13)
    under = policy("cgopipe", 3, 640, num_kv_pages=76_800, weights=Placement(vram=0.66, dram=0.34))
    cost = of.cost_of(load, under)
    assert cost.seconds == pytest.approx(_simulated_s(of, under, load), rel=0.05)
    assert cost.seconds > 1.1 * max(cost.lanes.values())


@pytest.mark.parametrize(
    ("model", "machine", "under", "work"),
    [
        ("gpt-oss-20b", "t4", policy("klotski", 8, 64, weights=ALL, num_slots=0), "decode"),
        ("mixtral-8x7b", "h100", policy("pregated", 8, 32, weights=ALL, num_slots=0), "mean"),
    ],
)
def test_a_gpu_projects_what_decodes_while_a_cpu_attends(
    model: str, machine: str, under: Policy, work: Work
) -> None:
    """One micro-batch goes the way down and up alone, and prompts come behind."""
    _is_held(_released(model, machine), under, work)


def test_experts_that_nobody_foresaw_come_until_slots_are_full() -> None:
    """Of DeepSeek-V2-Lite on a T4, whose experts that stay are computed before a slot is free."""
    under = policy("ondemand", 4, 256, weights=Placement(vram=0.37, dram=0.63), num_slots=6)
    _is_held(_released("deepseek-v2-lite", "t4"), under, "decode")


def test_nothing_is_asked_for_in_layers_without_experts() -> None:
    """Of Switch-base, every other one of whose layers has some, on an H100."""
    of = replace(_released("switch-base-8", "h100"), workload=ENCODING.workload)
    _is_held(of, policy("ondemand", 3, 4, num_slots=8, kv_cache=ALL, **GPU), "decode")


@pytest.mark.parametrize(
    ("model", "machine", "under"),
    [
        ("gpt-oss-20b", "t4", policy("simple", 2, 4, num_slots=2, **GPU)),
        ("mixtral-8x7b", "2xt4", policy("multi", 1, 4, num_slots=2)),
        ("mixtral-8x7b", "2xt4", policy("prefetch_all", 2, 4, num_slots=2)),
    ],
)
def test_of_whole_layers_come_what_has_slots_and_what_is_chosen(
    model: str, machine: str, under: Policy
) -> None:
    _is_held(_released(model, machine), under, "decode")


def test_micro_batches_that_walk_alone_wait_in_each_layer_for_what_it_brings() -> None:
    """Of Mixtral-8x7B on an H100: one or two experts of a layer, and one micro-batch in three that
    a CPU attends to."""
    shares = Placement(vram=0.82, dram=0.18)
    under = policy("simple", 2, 768, num_slots=2, weights=shares, tokens_per_pass=6144)
    _is_held(_released("mixtral-8x7b", "h100"), under, "mean")


def test_a_page_goes_up_when_micro_batches_have_been_through_a_layer_without_experts() -> None:
    """Of Switch-base, every other one of whose layers has some, on an L4."""
    of = replace(_released("switch-base-8", "l4"), workload=ENCODING.workload)
    _is_held(of, policy("fastdecode", 2, 4, weights=Placement(vram=0.25, dram=0.75)), "decode")


@pytest.mark.parametrize("count", [3, 8])
def test_a_window_is_filled_again_when_what_is_new_has_been_stored(count: int) -> None:
    """States of Granite-4, as large as those that come, on two T4s; the window of the last of three
    micro-batches is that of the first one in the next layer."""
    of, shares = _released("granite-4.0-h-tiny", "2xt4"), Placement(vram=0.2, dram=0.8)
    under = policy("klotski", count, 256, num_slots=64, weights=shares, kv_cache=shares, **GPU)
    load = decode_load(of, under)
    planned_s = of.cost_of(load, under).seconds
    assert planned_s == pytest.approx(_simulated_s(of, under, load), rel=0.05)


def _is_held(of: Problem, under: Policy, work: Work) -> None:
    """The planner's seconds are those of a simulation."""
    load = mean_load(of, under) if work == "mean" else decode_load(of, under)
    planned_s = of.cost_of(load, under).seconds
    assert planned_s == pytest.approx(_simulated_s(of, under, load), rel=0.1)


def _released(model: str, machine: str) -> Problem:
    """A released model on a machine of the documentation."""
    shape, hardware = load_model(model).shape, load_profile(machine).hardware()
    return replace(ON_GPU, shape=shape, hardware=hardware)


def _beside_prompts(num_decoding: int, num_prompts: int) -> PassLoad:
    decoding = PassLoad.decoding(num_decoding, 576)
    prompts = PassLoad.of_prompts(num_prompts, 512, encodes=False)
    return PassLoad(*map(sum, zip(decoding, prompts, strict=True)))


def _simulated_s(of: Problem, under: Policy, load: PassLoad) -> float:
    """The second of two such passes."""
    passes, routing = [split(load, of, under)] * 2, SkewedRouting(shape=of.shape)
    world = SimWorld(of, under, passes=passes, routing=routing)
    timeline = simulate(under.schedule, world.setup, world.room, world, num_passes=2)
    return timeline.steady_pass_s
