"""Pre-gated MoE's memory (Eq. 1), read off the slots that a simulation holds at a time.

Of consecutive blocks with activation level N, N + 1 have their experts there at most; the other two
schedules hold those of one block, or all of two.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.lanes import LANES
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline
from tests.few import examples
from tests.schedule.check import check_timeline
from tests.schedule.worlds import TableWorld

EXPERT_BYTES = 18_874_368
"""Of Switch-base, in float32."""
DENSE_BYTES = 1_577_975_808
"""What Switch-base-8 takes beside its experts."""
NUM_EXPERTS = 8
INSTANTLY = {Kind.ATTEND: 1.0, Kind.EXPERT: 1.0}
"""Experts are there at once: so all of a block are, before the first of them is done."""
Blocks = list[set[int]]


def run(
    name: str,
    blocks: Blocks,
    *,
    level: int = 1,
    seconds: dict[Kind, float] = INSTANTLY,
    num_slots: int = 4 * NUM_EXPERTS,
) -> Timeline:
    """Two passes whose blocks choose those experts."""
    setup = Setup(
        num_layers=len(blocks),
        num_experts=NUM_EXPERTS,
        moe_layers=frozenset(range(len(blocks))),
        num_hot=1,
        lanes=LANES,
        compute="vram",
        activation_level=level,
    )
    world = TableWorld(
        seconds,
        [Sweep(num_micro_batches=1)] * 2,
        choices={(layer, 0): sorted(chosen) for layer, chosen in enumerate(blocks)},
        num_layers=len(blocks),
        num_experts=NUM_EXPERTS,
    )
    timeline = simulate(name, setup, Room(num_slots=num_slots), world, num_passes=2)
    check_timeline(timeline)
    return timeline


def peak_slots(timeline: Timeline) -> int:
    """Most slots that are held at a time: one that is free is taken again before a fresh one is."""
    return len({span.slots for span in timeline.spans if span.task.kind is Kind.CHUNK})


def active(blocks: Blocks, level: int) -> int:
    """Eq. 1 without what is no expert: the most that a block and those that it knows of choose. For
    the first blocks, which choose for themselves, the next ones do so as well, so it knows less."""
    sizes = [len(chosen) for chosen in blocks]
    first = [sizes[b] + sum(sizes[level : level + b + 1]) for b in range(level)]
    return max([*first, *(sum(sizes[b : b + level + 1]) for b in range(level, len(blocks)))])


blocks_of_experts = st.lists(
    st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1), min_size=4, max_size=8
)


@examples(50)
@given(blocks=blocks_of_experts, level=st.integers(1, 3))
def test_pregated_holds_what_consecutive_blocks_have_chosen(blocks: Blocks, level: int) -> None:
    timeline = run("pregated", blocks, level=level)
    assert peak_slots(timeline) == active(blocks, level)
    moved = [span for span in timeline.spans if span.task.kind is Kind.CHUNK]
    assert len(moved) == 2 * sum(map(len, blocks)), "exactly the chosen ones come, each once"


@examples(50)
@given(
    blocks=blocks_of_experts,
    level=st.integers(1, 3),
    compute_s=st.floats(0.1, 3.0),
    move_s=st.floats(0.1, 3.0),
)
def test_more_slots_than_that_bring_nothing(
    blocks: Blocks, level: int, compute_s: float, move_s: float
) -> None:
    seconds = {Kind.ATTEND: 1.0, Kind.EXPERT: compute_s, Kind.CHUNK: move_s}
    many = run("pregated", blocks, level=level, seconds=seconds)
    enough = active(blocks, level)
    few = run("pregated", blocks, level=level, seconds=seconds, num_slots=enough)
    assert peak_slots(many) <= enough
    assert few.length_s == many.length_s


@examples(50)
@given(blocks=blocks_of_experts)
def test_the_baselines_hold_one_block_or_all_of_two(blocks: Blocks) -> None:
    assert peak_slots(run("ondemand", blocks)) == max(map(len, blocks))
    # With more slots it would begin the layer after the next one while the last expert computes.
    two_layers = run("prefetch_all", blocks, num_slots=2 * NUM_EXPERTS)
    assert peak_slots(two_layers) == 2 * NUM_EXPERTS


@pytest.mark.parametrize(
    ("name", "measured_bytes"),
    [
        ("pregated", 1_615_724_544),
        ("ondemand", 1_596_850_176),
        ("prefetch_all", 1_879_965_696),
    ],
)
def test_one_sequence_of_switch_takes_as_many_bytes_as_measured(
    name: str, measured_bytes: int
) -> None:
    timeline = run(name, [{block} for block in range(6)], num_slots=2 * NUM_EXPERTS)
    assert DENSE_BYTES + peak_slots(timeline) * EXPERT_BYTES == measured_bytes
