"""Block times of Pre-gated MoE and its two baselines, simulated from the paper's two parameters.

A100 with PCIe 4, Switch-base in float32, six blocks of a decoder: a block computes for 0.94 ms, an
expert of 18.9 MB is on its way for 0.836 ms alone and 0.797 ms in a row. Where on average more than
max(0.94, 0.836 k) has been measured for k experts a block, that is because no choice goes from one
pass to the next: the first block computes its attention before anything is asked for, and the last
one its experts while nothing moves, or, if a block computes for longer, the first one waits for its
experts. So a block takes min(0.94, 0.836 k) / 6 more, about 0.15 ms; nothing else is added here.
"""

import pytest

from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.lanes import LANES
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline
from tests.schedule.worlds import TableWorld

NUM_BLOCKS, NUM_EXPERTS = 6, 64
COMPUTED_MS, ALONE_MS, IN_ROW_MS = 0.94, 0.836, 0.797
MEASURED_MS = {
    ("ondemand", 1): 1.85,
    ("ondemand", 2): 2.65,
    ("ondemand", 4): 4.54,
    ("ondemand", 8): 7.95,
    ("ondemand", 16): 14.64,
    # Of one expert 1.18 ms are given elsewhere, for which 1.08 would be too little: runs differ.
    ("pregated", 1): 1.129,
    ("pregated", 2): 1.77,
    ("pregated", 4): 3.42,
    ("pregated", 8): 6.69,
    ("pregated", 16): 13.7,
}
"""Of 64 experts, by those that a block chooses."""
ALL_MEASURED_MS = {8: 6.73, 16: 12.75, 64: 51.03}
"""Whole layers by their experts; 27.25 for 32 is 6.8 % above 32 times 0.797."""


def run(name: str, *, chosen: int, num_experts: int = NUM_EXPERTS, level: int = 1) -> Timeline:
    setup = Setup(
        num_layers=NUM_BLOCKS,
        num_experts=num_experts,
        moe_layers=frozenset(range(NUM_BLOCKS)),
        num_hot=1,
        lanes=LANES,
        compute="vram",
        activation_level=level,
    )
    world = TableWorld(
        {
            Kind.ATTEND: 0.5,
            Kind.EXPERT: COMPUTED_MS - 0.5,
            Kind.CHUNK: IN_ROW_MS if name == "prefetch_all" else ALONE_MS,
        },
        [Sweep(num_micro_batches=1)] * 3,
        choices={(layer, 0): range(chosen) for layer in range(NUM_BLOCKS)},
        num_layers=NUM_BLOCKS,
        num_experts=num_experts,
    )
    return simulate(name, setup, Room(num_slots=2 * num_experts), world, num_passes=3)


@pytest.mark.parametrize(("name", "chosen"), MEASURED_MS)
def test_blocks_take_as_long_as_measured(name: str, chosen: int) -> None:
    found = run(name, chosen=chosen).steady_pass_s / NUM_BLOCKS
    assert found == pytest.approx(MEASURED_MS[name, chosen], rel=0.06)


@pytest.mark.parametrize("num_experts", ALL_MEASURED_MS)
def test_whole_layers_take_as_long_as_measured(num_experts: int) -> None:
    timeline = run("prefetch_all", chosen=1, num_experts=num_experts)
    found = timeline.steady_pass_s / NUM_BLOCKS
    assert found == pytest.approx(ALL_MEASURED_MS[num_experts], rel=0.06)


@pytest.mark.parametrize("chosen", [1, 2, 4, 8, 16])
def test_what_is_more_than_the_slower_of_two_is_the_ends_of_a_pass(chosen: int) -> None:
    moved_ms = ALONE_MS * chosen
    expected = max(COMPUTED_MS, moved_ms) + min(COMPUTED_MS, moved_ms) / NUM_BLOCKS
    found = run("pregated", chosen=chosen).steady_pass_s / NUM_BLOCKS
    assert found == pytest.approx(expected)


def test_without_pregates_experts_come_on_demand() -> None:
    exact, ondemand = run("pregated", chosen=3, level=0), run("ondemand", chosen=3)
    assert exact == ondemand
