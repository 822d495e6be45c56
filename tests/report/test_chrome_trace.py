"""Traces follow the rules of the Chrome trace event format, and hold every number of a timeline."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.report.pictures.chrome_trace import chrome_trace, write_chrome_trace
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span, Timeline
from tests.report.timelines import cgopipe, expert_major

Event = dict[str, Any]
BOTH = {"predicted": cgopipe(), "measured": expert_major()}


def events(timelines: dict[str, Timeline] = BOTH) -> list[Event]:
    trace: dict[str, Any] = json.loads(json.dumps(chrome_trace(timelines), allow_nan=False))
    found: list[Event] = trace["traceEvents"]
    return found


def of_phase(phase: str, found: list[Event]) -> list[Event]:
    return [event for event in found if event["ph"] == phase]


def rows(found: list[Event]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of_phase("M", found)
        if event["name"] == "thread_name"
    }


def check(found: list[Event]) -> None:
    """The rules of the format."""
    for event in found:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        assert event["ts"] >= 0
    named = {event["name"] for event in of_phase("M", found)}
    assert named <= {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
    assert all(event["dur"] >= 0 for event in of_phase("X", found))
    assert all(event["s"] in "gpt" for event in of_phase("i", found))
    for row in rows(found):
        ran = [e for e in of_phase("X", found) if (e["pid"], e["tid"]) == row]
        ran.sort(key=lambda event: (event["ts"], event["dur"]))
        for earlier, later in pairwise(ran):
            end_ns = round(1000 * earlier["ts"]) + round(1000 * earlier["dur"])
            assert end_ns <= round(1000 * later["ts"])


def test_every_event_follows_the_rules() -> None:
    check(events())


@given(st.lists(st.floats(0, 1, allow_nan=False), min_size=2, max_size=40))
def test_neighbours_never_overlap_whatever_their_ends(lengths: list[float]) -> None:
    spans, now = [], 0.0
    for number, length in enumerate(lengths):
        spans.append(Span(Task(Kind.EXPERT, number), "cpu", now, now + length))
        now += length
    check(events({"any": Timeline(num_layers=3, pass_ends_s=(now,), spans=tuple(spans))}))


def test_each_timeline_is_a_process_and_each_lane_a_row_in_fixed_order() -> None:
    found = events()
    names = [e["args"]["name"] for e in of_phase("M", found) if e["name"] == "process_name"]
    assert names == ["predicted", "measured"]
    assert [name for (pid, _), name in sorted(rows(found).items()) if pid == 1] == [
        "gpu",
        "gpu waits",
        "cpu",
        "dram->vram",
        "vram->dram",
        "staging",
    ]
    order = {
        (event["pid"], event["tid"]): event["args"]["sort_index"]
        for event in of_phase("M", found)
        if event["name"] == "thread_sort_index"
    }
    assert sorted(order) == sorted(order, key=lambda row: (row[0], order[row]))
    assert order.keys() == rows(found).keys()


def test_every_span_is_there_with_its_numbers() -> None:
    timeline = expert_major()
    found = events({"measured": timeline})
    lanes = rows(found)
    shown = [event for event in of_phase("X", found) if event["cat"] != "wait"]
    assert len(shown) == len(timeline.spans)
    tasks = {(e["cat"], e["args"]["step"], *e["args"].get("experts", [None])): e for e in shown}
    for span in timeline.spans:
        event = tasks[span.task.kind, span.task.step, span.task.expert]
        assert lanes[event["pid"], event["tid"]] == span.lane
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(span.seconds * 1e6, abs=2e-3)
        assert event["args"]["seconds"] == span.seconds
        assert event["args"]["layer"] == span.task.step % timeline.num_layers
        assert event["args"]["walk"] == span.task.step // timeline.num_layers
        assert event["args"].get("slots", []) == list(span.slots)
        assert event["args"].get("waited_for") == span.waited_for


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Task(Kind.EXPERT, 13, expert=5), "L3 expert 5"),
        (Task(Kind.EXPERT, 13, 2, 5), "L3 expert 5 mb 2"),
        (Task(Kind.ATTEND, 3, 2), "L3 attend mb 2"),
        (Task(Kind.CHUNK, 3, expert=5, part=1), "L3 chunk expert 5 part 1"),
        (Task(Kind.PAGE, 3, page=4), "L3 page 4"),
        (Task(Kind.STAGE, 3, page=4), "L3 stage page 4"),
        (Task(Kind.BLOCK, 3), "L3 block"),
    ],
)
def test_tasks_are_named(task: Task, name: str) -> None:
    timeline = Timeline(num_layers=10, pass_ends_s=(1.0,), spans=(Span(task, "gpu", 0, 1),))
    assert [event["name"] for event in of_phase("X", events({"one": timeline}))] == [name]


def test_waits_of_the_busiest_lane_have_a_row() -> None:
    found = [event for event in events({"one": cgopipe()}) if event.get("cat") == "wait"]
    assert [event["args"]["seconds"] for event in found] == [1.5, 0.5]
    assert found[0]["name"] == "results of attention on their way up"
    assert found[0]["args"]["before"].startswith("before MoE block of micro-batch 0 in layer 0")


def test_ends_of_passes_are_marked() -> None:
    timeline = expert_major(num_passes=3)
    marks = of_phase("i", events({"one": timeline}))
    assert [mark["name"] for mark in marks] == [f"end of pass {k}" for k in range(3)]
    assert [mark["ts"] / 1e6 for mark in marks] == pytest.approx(timeline.pass_ends_s)


def test_an_empty_timeline_is_a_valid_trace() -> None:
    found = events({"nothing": Timeline(num_layers=1, pass_ends_s=(), spans=())})
    check(found)
    assert not of_phase("X", found)


def test_a_file_is_plain_or_compressed_by_its_name(tmp_path: Path) -> None:
    plain, packed = tmp_path / "out.json", tmp_path / "out.json.gz"
    write_chrome_trace(plain, BOTH)
    write_chrome_trace(packed, BOTH)
    assert json.loads(plain.read_text()) == json.loads(json.dumps(chrome_trace(BOTH)))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    first = packed.read_bytes()
    write_chrome_trace(packed, BOTH)
    assert packed.read_bytes() == first
