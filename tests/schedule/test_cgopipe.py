"""CGOPipe against the worked example of two layers and three micro-batches, task by task."""

import re
from dataclasses import replace

import pytest

from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.request import Sweep
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline
from tests.schedule.check import check_timeline
from tests.schedule.test_klotski import SETUP
from tests.schedule.worlds import TableWorld

GOLDEN = """
 1 Pre(0,0) 0-1 | 2 Off(0,0) 1-1.2 | 3 Attn(0,0) 1.2-3.2 | 4 Stage(1,0) 0-1 | 5 Pre(0,1) 1-2
 6 Off(0,1) 2-2.2 | 7 Attn(0,1) 3.2-5.2 | 8 Stage(1,1) 1-2
 9 Load(0,0) 3.2-3.5 |10 Page(1,0) 3.5-5 |11 Post(0,0) 3.5-5.5 |12 Pre(0,2) 5.5-6.5
13 Off(0,2) 6.5-6.7 |14 Attn(0,2) 6.7-8.7 |15 Stage(1,2) 2-3
16 Load(0,1) 5.2-5.5 |17 Page(1,1) 5.5-7 |18 Post(0,1) 6.5-8.5 |19 Pre(1,0) 8.5-9.5
20 Off(1,0) 9.5-9.7 |21 Attn(1,0) 9.7-11.7 |22 Stage(2,0) 5-6
23 Load(0,2) 8.7-9 |24 Page(1,2) 9-10.5 |25 Post(0,2) 9.5-11.5 |26 Pre(1,1) 11.5-12.5
27 Off(1,1) 12.5-12.7 |28 Attn(1,1) 12.7-14.7 |29 Stage(2,1) 7-8
30 Load(1,0) 11.7-12 |31 Page(2,0) 12-13.5 |32 Post(1,0) 12.5-14.5 |33 Pre(1,2) 14.5-15.5
34 Off(1,2) 15.5-15.7 |35 Attn(1,2) 15.7-17.7 |36 Stage(2,2) 10.5-11.5
37 Load(1,1) 14.7-15 |38 Page(2,1) 15-16.5 |39 Post(1,1) 15.5-17.5
40 Load(1,2) 17.7-18 |41 Page(2,2) 18-19.5 |42 Post(1,2) 18-20
"""
SECONDS = {
    Kind.PRE: 1,
    Kind.OFF: 0.2,
    Kind.ATTN: 2,
    Kind.LOAD: 0.3,
    Kind.PAGE: 1.5,
    Kind.POST: 2,
    Kind.STAGE: 1,
}


def run(num_micro_batches: int, num_passes: int) -> Timeline:
    sweep = Sweep(num_micro_batches=num_micro_batches, on_cpu=(True,) * num_micro_batches)
    world = TableWorld(SECONDS, [sweep] * num_passes)
    return simulate("cgopipe", SETUP, Room(num_slots=8), world, num_passes=num_passes)


def second_pass() -> tuple[Timeline, dict[str, tuple[float, float]]]:
    """The example begins with the first layer's pages in place: so does any pass but the first."""
    timeline = run(3, 2)
    start = timeline.pass_ends_s[0]
    found = {}
    for span in timeline.spans:
        task = span.task
        number = task.page if task.micro_batch is None else task.micro_batch
        name = f"{task.kind.capitalize()}({task.step - 2},{number})"
        found[name] = (span.start_s - start, span.end_s - start)
    return timeline, found


def test_the_worked_example_task_by_task() -> None:
    _, found = second_pass()
    golden = re.findall(r"(\w+\(\d,\d\)) ([\d.]+)-([\d.]+)", GOLDEN)
    assert len(golden) == 42
    for name, start, end in golden:
        assert found[name] == pytest.approx((float(start), float(end))), name


def test_the_worked_example_takes_20_and_keeps_its_lanes_as_busy() -> None:
    timeline, _ = second_pass()
    assert timeline.pass_s[1] == pytest.approx(20.0)
    start = timeline.pass_ends_s[0]
    busy = {lane: timeline.busy_s(lane, since_s=start) for lane in timeline.lanes}
    expected = {"gpu": 18.0, "cpu": 12.0, "dram->vram": 10.8, "vram->dram": 1.2, "staging": 6.0}
    assert busy == pytest.approx(expected)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7])
def test_it_runs_with_fewer_micro_batches_than_it_looks_ahead(num_micro_batches: int) -> None:
    timeline = run(num_micro_batches, 3)
    posts = [span for span in timeline.on("gpu") if span.task.kind is Kind.POST]
    assert len(posts) == 3 * 2 * num_micro_batches


def _begins_and_ends(on_cpu: tuple[bool, ...]) -> dict[str, tuple[float, float]]:
    """Of tasks of a pass of two layers, by the first letters of their kinds, layer, micro-batch."""
    sweep = Sweep(num_micro_batches=len(on_cpu), on_cpu=on_cpu)
    world = TableWorld(SECONDS | {Kind.ATTEND: 0.1}, [sweep])
    timeline = simulate("cgopipe", SETUP, Room(num_slots=8), world, num_passes=1)
    return {
        f"{span.task.kind} {span.task.step} {span.task.micro_batch}": (span.start_s, span.end_s)
        for span in timeline.spans
    }


def test_a_cpu_attends_while_a_gpu_computes_prompts() -> None:
    found = _begins_and_ends((True, False, False))
    assert found["attn 1 0"][0] < found["post 0 1"][1]


def test_a_cpu_attends_for_one_of_two_micro_batches_while_a_gpu_computes_the_other() -> None:
    found = _begins_and_ends((True, True))
    assert found["attn 0 1"][0] < found["post 0 0"][1]
    assert found["attn 1 0"][0] < found["post 0 1"][1]


def test_pages_go_up_while_a_gpu_is_busy_with_prompts() -> None:
    """Two micro-batches that decode are over sooner than any page is up."""
    on_cpu = (True, True, False, False)
    launched = _links_of(Sweep(num_micro_batches=4, on_cpu=on_cpu, tokens=(12, 8, 90, 90)))
    assert launched == ["load 0 0", "load 0 1", "page 1", "page 1", "page 1", "page 1"]


def test_the_cache_of_prompts_comes_before_pages_and_behind_what_decodes() -> None:
    on_cpu = (True, True, False, False)
    launched = _links_of(Sweep(num_micro_batches=4, on_cpu=on_cpu), kv_homes=("dram",) * 2)
    first_page = launched.index("page 1")
    assert launched[:first_page] == ["load 0 0", "kv up 0 2"]
    assert launched.index("load 0 1") > first_page, "one page behind each, where none has more"


def test_micro_batches_that_decode_have_a_page_each_however_few_are_left_for_the_last() -> None:
    launched = _links_of(Sweep(num_micro_batches=2, on_cpu=(True, True), tokens=(512, 67)))
    assert launched == ["load 0 0", "page 1", "load 0 1", "page 1"]


def _links_of(sweep: Sweep, **setup: object) -> list[str]:
    """What goes up for the first layer and the weights of the second, in the order of launch."""
    world = TableWorld(SECONDS | {Kind.ATTEND: 0.1, Kind.KV_UP: 0.1, Kind.KV_DOWN: 0.1}, [sweep])
    room = Room(num_slots=8)
    timeline = simulate("cgopipe", replace(SETUP, **setup), room, world, num_passes=1)
    tasks = [span.task for span in timeline.spans if span.lane == "dram->vram"]
    of_layer = [task for task in tasks if (task.kind is Kind.PAGE) == (task.step == 1)]
    return [
        str(task.kind) + f" {task.step}" + f" {task.micro_batch}" * (task.kind is not Kind.PAGE)
        for task in of_layer
        if task.step < 2
    ]


def test_a_page_waits_until_nobody_reads_what_it_overwrites() -> None:
    """With slow experts and fast links only the extra edge keeps the buffer whole."""
    sweep = Sweep(num_micro_batches=3, on_cpu=(True,) * 3)
    seconds = {**SECONDS, Kind.POST: 50, Kind.ATTN: 0.1}
    world = TableWorld(seconds, [sweep] * 3)
    timeline = simulate("cgopipe", SETUP, Room(num_slots=8), world, num_passes=3)
    posts = {s.task.step: s.end_s for s in timeline.spans if s.task.kind is Kind.POST}
    for span in timeline.spans:
        if span.task.kind is Kind.PAGE and span.task.step >= 2:
            assert span.start_s >= posts[span.task.step - 2]


@pytest.mark.parametrize("name", ["cgopipe", "fastdecode", "flexgen", "simple"])
def test_passes_without_prompts_leave_the_layers_of_an_encoder_out(name: str) -> None:
    """Pages come in vain behind a pass whose next one has other layers, and come again."""
    sweeps = [Sweep(num_micro_batches=2, encodes=encodes) for encodes in (True, False, False, True)]
    setup = replace(SETUP, num_layers=4, moe_layers=frozenset(range(4)), num_encoding=2)
    choices = {(layer, k): (0, 1) for layer in range(4) for k in range(2)}
    world = TableWorld(SECONDS | {Kind.ATTEND: 0.1}, sweeps, choices, num_layers=4)
    timeline = simulate(name, setup, Room(num_slots=8), world, num_passes=4)
    check_timeline(timeline)
    walks = 2 if name == "simple" else 1  # each micro-batch for itself
    attended = {span.task.step for span in timeline.spans if span.task.kind is Kind.ATTEND}
    layers = [[0, 1, 2, 3] * walks, [2, 3] * walks, [2, 3] * walks, [0, 1, 2, 3] * walks]
    assert [step % 4 for step in sorted(attended)] == [one for each in layers for one in each]
