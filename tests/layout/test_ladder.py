"""Which levels a machine has, and which lanes there are between them under a policy."""

from dataclasses import replace

import pytest

from moebatch.layout.ladder import Ladder, lanes_of
from moebatch.layout.placed import PlacedModel
from moebatch.schedule.drivers.simulate import simulate
from moebatch.schedule.lanes import LANES, lane_of_row
from moebatch.schedule.registry import SCHEDULES
from moebatch.schedule.request import Sweep
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.policy.policy import Placement, Policy
from tests.plan.problems import SHAPE, cpu_machine, gpu_machine
from tests.schedule.worlds import RandomWorld

CPU, GPU = Ladder(("disk", "dram")), Ladder(("disk", "dram", "vram"))
POLICY = Policy(
    batch_size=8,
    micro_batch_size=4,
    tokens_per_pass=16,
    num_slots=2,
    num_kv_pages=8,
    weights=Placement(dram=1),
)
ON_GPU = replace(POLICY, attention_on_gpu=True, ffn_on_gpu=True)


def names(ladder: Ladder, policy: Policy) -> list[str]:
    return [lane.name for lane in lanes_of(ladder, policy)]


@pytest.mark.parametrize("ladder", [CPU, GPU])
def test_levels_and_links_agree(ladder: Ladder) -> None:
    for level in ladder.levels:
        below = ladder.below(level)
        if below is None:
            assert (level, ladder.link_up(level)) == ("disk", None)
        else:
            assert ladder.link_up(level) == f"{below}->{level}"


def test_levels_are_those_of_the_machine() -> None:
    assert Ladder.of(cpu_machine()).levels == ("disk", "dram")
    assert Ladder.of(gpu_machine()).levels == ("disk", "dram", "vram")


def test_without_a_gpu_everything_is_computed_in_main_memory() -> None:
    assert (CPU.top, CPU.experts_at(ON_GPU), CPU.attends_at(ON_GPU)) == ("dram",) * 3
    assert (GPU.top, GPU.experts_at(POLICY), GPU.attends_at(POLICY)) == ("vram", "dram", "dram")
    assert names(CPU, POLICY) == ["cpu", "disk->dram"]


@pytest.mark.parametrize(
    ("ladder", "num_slots", "weights", "most"),
    [
        (CPU, 0, Placement(dram=1), 16),
        (CPU, 5, Placement(dram=0.5, disk=0.5), 1),
        (CPU, 6, Placement(dram=0.5, disk=0.5), 2),
        (CPU, 22, Placement(disk=1), 7),
        (CPU, 100, Placement(disk=1), 16),
        (GPU, 22, Placement(dram=1), 1),
        (replace(GPU, has_gpu=True), 2, Placement(dram=1), 16),
    ],
)
def test_experts_are_computed_together_as_far_as_the_link_up_does_not_wait_for_their_slots(
    ladder: Ladder, num_slots: int, weights: Placement, most: int
) -> None:
    assert ladder.most_together(replace(POLICY, num_slots=num_slots, weights=weights)) == most


def test_the_cpu_has_a_lane_beside_a_gpu_where_it_computes() -> None:
    assert "cpu" in names(GPU, replace(ON_GPU, attention_on_gpu=False))
    assert "cpu" in names(GPU, replace(ON_GPU, ffn_on_gpu=False))
    assert "cpu" not in names(GPU, ON_GPU)


def test_pages_are_staged_only_where_copies_are() -> None:
    pages, experts = replace(ON_GPU, schedule="cgopipe"), ON_GPU
    staging = Ladder(GPU.levels, stages=True)
    assert "staging" in names(staging, pages)
    assert "staging" not in names(GPU, pages)
    assert "staging" not in names(staging, experts)


def test_only_keys_and_values_are_written_to_disk() -> None:
    assert "dram->disk" in names(CPU, replace(POLICY, kv_cache=Placement(dram=0.5, disk=0.5)))
    assert "dram->disk" not in names(CPU, POLICY)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ladder", [CPU, GPU, Ladder(GPU.levels, stages=True)])
def test_lanes_are_known_and_there_once(ladder: Ladder, schedule: str) -> None:
    found = names(ladder, replace(ON_GPU, schedule=schedule))
    assert len(set(found)) == len(found)
    assert set(found) <= {lane.name for lane in LANES}


@pytest.mark.few()
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("attends_above", [True, False])
@pytest.mark.parametrize("ladder", [CPU, GPU, Ladder(GPU.levels, stages=True)])
def test_a_simulated_pass_runs_on_lanes_that_are_listed(
    ladder: Ladder, attends_above: bool, schedule: str
) -> None:
    third = Placement(vram=0.4, dram=0.3, disk=0.3)
    placed = third if ladder.top == "vram" else Placement(dram=0.7, disk=0.3)
    policy = replace(
        ON_GPU,
        attention_on_gpu=attends_above,
        schedule=schedule,
        num_slots=16,
        weights=placed,
        kv_cache=placed,
    )
    timeline = simulated(ladder, policy)
    assert {lane_of_row(row) for row in timeline.lanes} <= set(names(ladder, policy))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_machine_without_a_disk_runs_every_schedule(schedule: str) -> None:
    policy = replace(ON_GPU, schedule=schedule, weights=Placement(dram=1))
    assert simulated(Ladder(("dram",)), policy).length_s > 0
    assert simulated(Ladder(("dram", "vram")), replace(policy, num_slots=16)).length_s > 0


def simulated(ladder: Ladder, policy: Policy) -> Timeline:
    """Two passes of two micro-batches."""
    placed = PlacedModel(SHAPE, policy, ladder)
    beside_gpu = ladder.attends_at(policy) != ladder.top
    sweep = Sweep(num_micro_batches=2, on_cpu=(beside_gpu,) * 2)
    world = RandomWorld(
        seed=1, num_layers=32, num_experts=8, experts_per_batch=3, sweeps=[sweep] * 2
    )
    room = placed.room(expert_bytes=2**24)
    return simulate(policy.schedule, placed.setup(), room, world, num_passes=2)
