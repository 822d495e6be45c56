"""Block times of Pre-gated MoE's two baselines, simulated from its own two parameters.

A100 with PCIe 4, Switch-base in float32, one sequence: a block computes for 0.94 ms, an expert of
18.9 MB is on its way for 0.836 ms alone and 0.797 ms in a row.
"""

import pytest

from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.simulate import Room, simulate
from moebatch.schedule.task import Kind
from tests.schedule.worlds import TableWorld

NUM_BLOCKS = 6
MEASURED_MS = {
    ("ondemand", 8): 2.031,
    ("ondemand", 16): 1.894,
    ("ondemand", 32): 1.745,
    ("ondemand", 64): 1.778,
    ("prefetch_all", 8): 6.73,
    ("prefetch_all", 16): 12.75,
    ("prefetch_all", 32): 27.25,
    ("prefetch_all", 64): 51.03,
}


@pytest.mark.parametrize(("name", "num_experts"), MEASURED_MS)
def test_blocks_take_as_long_as_measured(name: str, num_experts: int) -> None:
    setup = Setup(
        num_layers=NUM_BLOCKS,
        num_experts=num_experts,
        moe_layers=frozenset(range(NUM_BLOCKS)),
        num_hot=1,
        compute="vram",
    )
    world = TableWorld(
        {Kind.ATTEND: 0.5, Kind.EXPERT: 0.44, Kind.CHUNK: 0.836 if name == "ondemand" else 0.797},
        [Sweep(num_micro_batches=1)] * 3,
        choices={(layer, 0): [num_experts // 2] for layer in range(NUM_BLOCKS)},
        num_layers=NUM_BLOCKS,
        num_experts=num_experts,
    )
    timeline = simulate(name, setup, Room(num_slots=2 * num_experts), world, num_passes=3)
    found = timeline.steady_pass_s / NUM_BLOCKS
    assert found == pytest.approx(MEASURED_MS[name, num_experts], rel=0.13)
