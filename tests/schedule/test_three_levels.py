"""Experts on disk under a GPU: what passes through main memory."""

from dataclasses import replace

import pytest

from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.lanes import LANES
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.transfer import ChunkStream, ThroughMemory
from moebatch.schedule.task import Kind
from tests.schedule.test_slots import KEYS, bring, queue
from tests.schedule.worlds import RandomWorld

SETUP = Setup(
    num_layers=4,
    num_experts=4,
    moe_layers=frozenset(range(4)),
    num_hot=4,
    window=2,
    lanes=LANES,
    compute="vram",
)
ON_GPU = frozenset(ExpertKey(layer, expert) for layer in range(4) for expert in (0, 1))


def test_what_lives_on_the_gpu_is_not_read_into_main_memory() -> None:
    """As in a run: nothing below knows of what lives above."""
    world = RandomWorld(
        seed=3,
        num_layers=4,
        num_experts=4,
        experts_per_batch=4,
        sweeps=[Sweep(num_micro_batches=2)] * 3,
    )
    room = Room(
        num_slots=4,
        resident=ON_GPU,
        num_slots_below=6,
        resident_below=frozenset(),
        num_chunks=2,
    )
    for name in ("klotski", "hot", "multi", "prefetch_all", "simple", "ondemand"):
        timeline = simulate(name, replace(SETUP), room, world, num_passes=3)
        fetched = {
            ExpertKey(SETUP.layer(span.task.step), span.task.expert)
            for span in timeline.spans
            if span.task.kind is Kind.FETCH and span.task.expert is not None
        }
        assert fetched and not fetched & ON_GPU, name


@pytest.mark.parametrize("given_up", ["between its chunks", "with one on its way", "for its loss"])
def test_what_is_given_up_on_its_way_up_leaves_main_memory(given_up: str) -> None:
    below, above = queue(1), queue(1)
    path = ThroughMemory(below, above)
    stream = ChunkStream(slots=above, path=lambda: path)
    above.prefetch(KEYS[:1])
    path.prefetch(KEYS[:1])
    bring(below, KEYS[0])
    chunk = stream.next_chunk()
    assert chunk is not None
    below.withdraw(0)
    assert below.is_ready(KEYS[0]), "the other chunk is still to go up"
    if given_up == "between its chunks":
        stream.moved(chunk)
    above.withdraw(0)
    if given_up == "with one on its way":
        stream.moved(chunk)
    elif given_up == "for its loss":
        stream.lost(chunk)
    assert not above.holds(KEYS[0])
    path.require(KEYS[1])
    bring(below, KEYS[1])


def test_what_has_gone_up_leaves_main_memory() -> None:
    below, above = queue(1), queue(1)
    path = ThroughMemory(below, above)
    stream = ChunkStream(slots=above, path=lambda: path)
    above.require(KEYS[0])
    path.require(KEYS[0])
    bring(below, KEYS[0])
    while chunk := stream.next_chunk():
        assert below.is_ready(KEYS[0])
        stream.moved(chunk)
    assert above.is_ready(KEYS[0]) and not below.holds(KEYS[0])


def test_of_experts_that_are_waited_for_one_that_can_go_up_stays_in_main_memory() -> None:
    below, above = queue(1), queue(2)
    path = ThroughMemory(below, above)
    above.require(KEYS[0])
    above.require(KEYS[1])
    below.prefetch(KEYS[1:2])
    bring(below, KEYS[1])
    path.hurry(KEYS[:2])
    below.require(KEYS[2])
    assert below.next_chunk() is None and below.is_ready(KEYS[1])


def test_an_expert_that_is_waited_for_comes_before_others_below() -> None:
    below, above = queue(2), queue(2)
    path = ThroughMemory(below, above)
    below.require(KEYS[2])
    above.require(KEYS[0])
    path.hurry(KEYS[:1])
    chunk = below.next_chunk()
    assert chunk is not None and chunk.load.key == KEYS[0]


def test_what_is_fetched_comes_as_far_as_main_memory_unless_it_is_above() -> None:
    below, above = queue(2), queue(1, resident=[KEYS[0]])
    above.fill_residents()
    ThroughMemory(below, above).fetch(KEYS[:2])
    assert not below.holds(KEYS[0]) and below.holds(KEYS[1])
    assert not above.holds(KEYS[1])
