"""`klotski` and `multi` against examples worked out with a pencil: three batches, four experts, two
layers, on a GPU.

An expert takes 2 to come up, attention of a batch 1, its gate 0.5, an expert 1, combining nothing.
Gates choose:

    layer 0: batch 0 {0, 1}, batch 1 {0, 2}, batch 2 {1, 2}; hot are 0 and 1
    layer 1: batch 0 {2, 3}, batch 1 {0, 2}, batch 2 {2, 3}; hot are 2 and 3
"""

import pytest

from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.lanes import LANES
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline
from tests.schedule.check import check_timeline
from tests.schedule.worlds import TableWorld

CHOICES = {
    (0, 0): (0, 1),
    (0, 1): (0, 2),
    (0, 2): (1, 2),
    (1, 0): (2, 3),
    (1, 1): (0, 2),
    (1, 2): (2, 3),
}
SECONDS = {Kind.ATTEND: 1.0, Kind.GATE: 0.5, Kind.EXPERT: 1.0, Kind.CHUNK: 2.0}
SETUP = Setup(
    num_layers=2,
    num_experts=4,
    moe_layers=frozenset({0, 1}),
    num_hot=2,
    lanes=LANES,
    compute="vram",
)


def run(name: str, *, num_slots: int, num_passes: int) -> Timeline:
    world = TableWorld(
        SECONDS,
        [Sweep(num_micro_batches=3)] * num_passes,
        choices=CHOICES,
        hot={0: (0, 1, 2, 3), 1: (2, 3, 0, 1)},
    )
    timeline = simulate(name, SETUP, Room(num_slots=num_slots), world, num_passes=num_passes)
    check_timeline(timeline)
    return timeline


def rows(timeline: Timeline, lane: str, *, until_s: float) -> list[tuple[str, float, float]]:
    return [
        (str(span.task), span.start_s, span.end_s)
        for span in timeline.on(lane)
        if span.start_s < until_s and span.seconds
    ]


def attention(step: int, start: float) -> list[tuple[str, float, float]]:
    """Attention and gate of the three batches, one after the other."""
    found = []
    for k in range(3):
        found.append((f"attend({step}, k{k})", start, start + 1))
        found.append((f"gate({step}, k{k})", start + 1, start + 1.5))
        start += 1.5
    return found


def test_klotski_runs_each_expert_once_hot_ones_first_then_as_they_arrive() -> None:
    timeline = run("klotski", num_slots=4, num_passes=2)
    assert rows(timeline, "gpu", until_s=22.5) == [
        *attention(0, 0),
        ("expert(0, e0)", 4.5, 5.5),
        ("expert(0, e1)", 5.5, 6.5),
        ("expert(0, e2)", 6.5, 7.5),
        *attention(1, 7.5),
        ("expert(1, e2)", 12, 13),
        ("expert(1, e3)", 13, 14),
        ("expert(1, e0)", 14, 15),
        *attention(2, 15),
        ("expert(2, e0)", 19.5, 20.5),
        ("expert(2, e1)", 20.5, 21.5),
        ("expert(2, e2)", 21.5, 22.5),
    ]
    assert timeline.pass_ends_s[0] == 15


def test_klotski_loads_cold_experts_when_a_gate_has_chosen_them_and_hot_ones_of_what_follows() -> (
    None
):
    timeline = run("klotski", num_slots=4, num_passes=2)
    assert rows(timeline, "dram->vram", until_s=22.5) == [
        ("chunk(0, e0, part0)", 0, 2),
        ("chunk(0, e1, part0)", 2, 4),
        ("chunk(0, e2, part0)", 4, 6),
        ("chunk(1, e2, part0)", 6, 8),
        ("chunk(1, e3, part0)", 8, 10),
        ("chunk(1, e0, part0)", 10.5, 12.5),  # batch 1 chose it at 10.5
        ("chunk(2, e0, part0)", 12.5, 14.5),  # the last layer loads for the next pass
        ("chunk(2, e1, part0)", 14.5, 16.5),
        ("chunk(2, e2, part0)", 18, 20),
        ("chunk(3, e2, part0)", 20, 22),
        ("chunk(3, e3, part0)", 22, 24),
    ]


def test_multi_waits_for_whole_layers_and_computes_batch_by_batch() -> None:
    timeline = run("multi", num_slots=8, num_passes=1)
    assert rows(timeline, "gpu", until_s=100) == [
        *attention(0, 0),
        ("expert(0, k0, e0)", 8, 9),
        ("expert(0, k0, e1)", 9, 10),
        ("expert(0, k1, e0)", 10, 11),
        ("expert(0, k1, e2)", 11, 12),
        ("expert(0, k2, e1)", 12, 13),
        ("expert(0, k2, e2)", 13, 14),
        *attention(1, 14),
        ("expert(1, k0, e2)", 18.5, 19.5),
        ("expert(1, k0, e3)", 19.5, 20.5),
        ("expert(1, k1, e0)", 20.5, 21.5),
        ("expert(1, k1, e2)", 21.5, 22.5),
        ("expert(1, k2, e2)", 22.5, 23.5),
        ("expert(1, k2, e3)", 23.5, 24.5),
    ]
    chunks = rows(timeline, "dram->vram", until_s=100)
    assert [(name, start) for name, start, _ in chunks] == [
        (f"chunk({step}, e{expert}, part0)", 8.0 * step + 2.0 * expert)
        for step in range(2)
        for expert in range(4)
    ] + [("chunk(2, e3, part0)", 16.0)]  # the others stay: there is room for both layers


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_few_slots_only_take_longer(num_slots: int) -> None:
    plenty = run("klotski", num_slots=4, num_passes=2)
    few = run("klotski", num_slots=num_slots, num_passes=2)
    computed = {span.task for span in plenty.spans if span.task.kind is Kind.EXPERT}
    assert {span.task for span in few.spans if span.task.kind is Kind.EXPERT} == computed
    assert few.length_s >= plenty.length_s
