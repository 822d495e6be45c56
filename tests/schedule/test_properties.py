"""Properties of every timeline: any schedule, any kind of machine, any number of slots."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.lanes import LANES, STAGING, lane_of_row
from moebatch.schedule.registry import SCHEDULES
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Timeline
from tests.few import examples
from tests.schedule.check import check_timeline
from tests.schedule.worlds import RandomWorld

EXPERTS, LAYERS = 5, 4
WITHOUT_STAGING = tuple(lane for lane in LANES if lane != STAGING)
_SIZES = st.integers(0, EXPERTS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Setup, Room, RandomWorld, int]:
    compute = draw(st.sampled_from(["vram", "dram"]))
    moe_layers = draw(st.sets(st.integers(0, LAYERS - 1), min_size=1))
    keys = [ExpertKey(layer, e) for layer in sorted(moe_layers) for e in range(EXPERTS)]
    homes = ["dram", "disk"] + (["vram"] if compute == "vram" else [])
    kv_homes = draw(
        st.one_of(st.just(()), st.lists(st.sampled_from(homes), min_size=LAYERS, max_size=LAYERS))
    )
    has_disk = compute == "vram" and draw(st.booleans())
    setup = Setup(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        moe_layers=frozenset(moe_layers),
        num_hot=draw(st.integers(0, EXPERTS)),
        depth=draw(st.integers(1, 3)),
        window=draw(st.integers(1, 3)) if has_disk else 0,
        lanes=draw(st.sampled_from([LANES, WITHOUT_STAGING])),
        kv_homes=tuple(kv_homes),
        compute=compute,
        most_together=draw(st.integers(1, 4)),
        activation_level=draw(st.integers(0, 3)),
        num_encoding=draw(st.sampled_from([0, 0, 1, 2])),
    )
    resident = draw(st.sets(st.sampled_from(keys), max_size=len(keys) - 1))
    below = draw(st.sets(st.sampled_from(keys))) if has_disk else None
    room = Room(
        num_slots=draw(st.integers(1, 2 * EXPERTS + 1)),
        resident=frozenset(resident),
        num_slots_below=draw(st.integers(1, 6)),
        resident_below=None if below is None else frozenset(below),
        num_chunks=draw(st.integers(1, 3)),
        cache_sizes=draw(st.dictionaries(st.sampled_from(sorted(moe_layers)), _SIZES)),
        cache_rule=draw(st.sampled_from(["lru", "lfu", "lifo", "foreseen"])),
    )
    num_passes = draw(st.integers(1, 3))
    sweeps = []
    for _ in range(num_passes):
        count = draw(st.integers(1, 5))
        on_cpu = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        together = [k for k in range(1, count) if on_cpu[k] == on_cpu[k - 1]]
        sweeps.append(
            Sweep(
                num_micro_batches=count,
                on_cpu=tuple(on_cpu) if compute == "vram" else (),
                continuing=frozenset(k for k in together if draw(st.booleans())),
                encodes=draw(st.booleans()),
            )
        )
    world = RandomWorld(
        seed=draw(st.integers(0, 10**6)),
        num_layers=LAYERS,
        num_experts=EXPERTS,
        experts_per_batch=draw(st.integers(1, EXPERTS)),
        sweeps=sweeps,
    )
    return setup, room, world, num_passes


def usual(**changes: object) -> Setup:
    """A GPU, all of whose layers have experts."""
    values: dict[str, object] = {
        "num_layers": LAYERS,
        "num_experts": EXPERTS,
        "moe_layers": frozenset(range(LAYERS)),
        "num_hot": 2,
        "lanes": WITHOUT_STAGING,
        "compute": "vram",
    }
    return Setup(**{**values, **changes})  # type: ignore[arg-type]


def seeded(sweeps: Sequence[Sweep]) -> RandomWorld:
    """One world for these passes."""
    return RandomWorld(
        seed=1, num_layers=LAYERS, num_experts=EXPERTS, experts_per_batch=2, sweeps=sweeps
    )


PAGED = {name for name, one in SCHEDULES.items() if one.traits.is_paged}


@pytest.mark.parametrize("name", SCHEDULES)
@examples(100)
@given(case=cases())
def test_no_deadlock_nothing_before_its_loads_and_no_slot_overwritten(
    name: str, case: tuple[Setup, Room, RandomWorld, int]
) -> None:
    setup, room, world, num_passes = case
    timeline = simulate(name, setup, room, world, num_passes=num_passes)
    check_timeline(timeline)
    if name != "simple":  # its steps are counted on from micro-batch to micro-batch
        _check_continuing(timeline, world.sweeps)
    tasks = [span.task for span in timeline.spans if span.task.kind is Kind.EXPERT]
    computed = Counter((task.step, task.micro_batch, e) for task in tasks for e in task.experts)
    assert all(count == 1 for count in computed.values()), "an expert was computed twice"
    assert all(len(task.experts) <= setup.most_together for task in tasks)
    for step in {task.step for task in tasks}:
        batches = world.sweeps[step // LAYERS].micro_batches if name != "simple" else ()
        chosen = {e for k in batches for e in world.chosen(step, k)}
        assert not chosen or chosen == {e for number, _, e in computed if number == step}
    if name not in PAGED:
        encodes = any(sweep.encodes for sweep in world.sweeps)
        assert computed or (not encodes and max(setup.moe_layers) < setup.num_encoding)
    slots = {span.slots for span in timeline.spans if span.task.kind is Kind.CHUNK}
    assert len(slots) <= room.num_slots + sum(room.cache_sizes.values())


@pytest.mark.parametrize("name", ["klotski", "multi", "simple"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_disk_is_as_fast_for_reads_and_writes_at_once_as_for_one_thing_at_a_time(
    name: str, num_chunks: int
) -> None:
    setup = usual(compute="dram", kv_homes=("disk",) * LAYERS, num_hot=3)
    world = seeded([Sweep(num_micro_batches=4)] * 2)
    room = Room(num_slots=EXPERTS, num_chunks=num_chunks)
    timeline = simulate(name, setup, room, world, num_passes=2)
    spans = [span for span in timeline.spans if "disk" in span.lane]
    busy_s, until_s = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        busy_s += max(0.0, span.end_s - max(until_s, span.start_s))
        until_s = max(until_s, span.end_s)
    assert {lane_of_row(span.lane) for span in spans} == {"disk->dram", "dram->disk"}
    assert any(
        one.start_s < other.end_s and other.start_s < one.end_s
        for one in spans
        for other in spans
        if one.lane == "disk->dram" and other.lane == "dram->disk"
    )
    # What is in flight at the end is counted to its end as it would be without more to come.
    longest_s = max(world.seconds(span.task) for span in spans)
    alone_s = sum(world.seconds(span.task) for span in spans)
    assert busy_s == pytest.approx(alone_s, abs=longest_s)


def _check_continuing(timeline: Timeline, sweeps: Sequence[Sweep]) -> None:
    """What a micro-batch sees of the one before it has been stored when it is read."""
    stored = {
        (span.task.step, span.task.micro_batch): span.end_s
        for span in sorted(timeline.spans, key=lambda span: span.end_s)
        if span.task.kind in (Kind.KV_DOWN, Kind.KV_WRITE)
    }
    for span in timeline.spans:
        i, k = span.task.step, span.task.micro_batch
        is_read = span.task.kind in (Kind.KV_READ, Kind.KV_UP)
        if is_read and k and sweeps[i // LAYERS].continues(k):
            assert span.start_s >= stored.get((i, k - 1), 0.0) - 1e-9, f"{span.task} is stale"


@pytest.mark.parametrize("name", ["cgopipe", "fastdecode"])
def test_a_continued_prompt_waits_for_its_own_layer_and_no_other(name: str) -> None:
    """Schedules that run ahead store some of the next layer before the prompt goes on."""
    sweep = Sweep(num_micro_batches=4, on_cpu=(True, True, False, False), continuing=frozenset({3}))
    setup = usual(kv_homes=("dram",) * LAYERS)
    world = seeded([sweep])
    timeline = simulate(name, setup, Room(num_slots=2 * EXPERTS), world, num_passes=1)
    tasks = [span.task for span in timeline.spans if span.task.micro_batch == 3]
    ups = [task for task in tasks if task.kind is Kind.KV_UP]
    assert len(ups) == LAYERS
    for task in ups:
        assert Task(Kind.KV_DOWN, task.step, 2) in task.after
        assert all(before.step <= task.step for before in task.after)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_task_keeps_none_of_passes_that_ended_long_ago(name: str, num_micro_batches: int) -> None:
    """A job may have a hundred thousand passes."""
    setup = usual()
    num_passes = 6
    world = seeded([Sweep(num_micro_batches=num_micro_batches)] * num_passes)
    timeline = simulate(name, setup, Room(num_slots=2 * EXPERTS), world, num_passes=num_passes)
    last = (num_passes - 1) * LAYERS
    kept = [span.task for span in timeline.spans if span.task.step >= last]
    for task in kept:
        kept.extend(task.after)
    assert min(task.step for task in kept) >= last - 2 * LAYERS


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - PAGED - {"simple"}))
def test_passes_without_prompts_leave_out_layers_that_are_for_prompts(name: str) -> None:
    setup = usual(lanes=LANES, compute="dram", num_encoding=2)
    sweeps = [Sweep(num_micro_batches=2, encodes=number % 2 == 0) for number in range(4)]
    world = seeded(sweeps)
    timeline = simulate(name, setup, Room(num_slots=2 * EXPERTS), world, num_passes=4)
    steps = {span.task.step for span in timeline.spans if span.task.kind is not Kind.CHUNK}
    assert steps == {*range(4), 6, 7, *range(8, 12), 14, 15}


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - PAGED))
def test_few_slots_that_all_layers_share_are_enough(name: str, num_slots: int) -> None:
    setup = Setup(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        moe_layers=frozenset({0, 2}),
        num_hot=1,
        lanes=LANES,
        compute="vram",
        activation_level=1,
    )
    room = Room(num_slots=num_slots, cache_rule="foreseen")
    for seed in range(3):
        sweeps = [Sweep(num_micro_batches=1 + seed)] * 3
        world = RandomWorld(
            seed=seed, num_layers=LAYERS, num_experts=EXPERTS, experts_per_batch=3, sweeps=sweeps
        )
        simulate(name, setup, room, world, num_passes=3)
