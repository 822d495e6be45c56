"""The Gantt picture: every task where it belongs, gaps left white, small whatever is drawn."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from moebatch.report.pictures.figure import Picture, rendered
from moebatch.report.pictures.gantt import WIDTH, gantt_picture, time_axis
from moebatch.report.pictures.gantt_bars import (
    EXPERTS,
    WEIGHTS,
    Window,
    bars,
    group_of,
    usual_window,
)
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span, Timeline
from tests.report.pictures import groups, notes, svg, svg_texts, texts
from tests.report.timelines import cgopipe, expert_major

WIDTH_OF_LANE = 40
Step = tuple[float, float, Kind]
"""Idle and busy seconds, and what ran."""
STEPS = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0, 3), st.sampled_from([Kind.EXPERT, Kind.ATTN])),
    min_size=1,
    max_size=60,
)


def drawn(timelines: dict[str, Timeline], **ends: float) -> Picture:
    return gantt_picture(timelines, title="lanes", **ends)


def rows(picture: Picture) -> list[list[tuple[float, float]]]:
    """Left and right edges of the bars of each lane."""
    axes = picture.figure.axes[0]
    assert isinstance(axes, Axes)
    found = []
    for shapes in axes.collections[1::2]:  # the others are the white rows below
        across = [path.vertices[:, 0] for path in shapes.get_paths()]
        found.append([(float(x.min()), float(x.max())) for x in across])
    return found


def tasks(picture: Picture) -> list[tuple[float, float]]:
    return [bar for row in rows(picture) for bar in row]


def lane_bars(spans: list[Span], length_s: float, width: float) -> list[tuple[float, float, float]]:
    window = Window(start_s=0, end_s=length_s)
    return [(bar.left, bar.right, bar.busy) for bar in bars(spans, window, width / length_s)]


def expert(start_s: float, end_s: float, kind: Kind = Kind.EXPERT) -> Span:
    return Span(Task(kind, 0, expert=0), "cpu", start_s, end_s)


def spans_of(steps: list[Step]) -> list[Span]:
    spans, now = [], 0.0
    for idle, busy, kind in steps:
        spans.append(expert(now + idle, now + idle + busy, kind))
        now += idle + busy
    return spans


def test_every_kind_of_task_has_a_colour() -> None:
    assert all(group_of(Task(kind, 0)).fill for kind in Kind)


def test_the_whole_example_is_drawn() -> None:
    picture = drawn({"cgopipe": cgopipe()})
    assert len(rows(picture)) == 5
    assert len(tasks(picture)) == 42
    found = texts(picture)
    for name in ("cgopipe", "gpu", "cpu", "dram->vram", "vram->dram", "staging"):
        assert name in found
    for share in ("90%", "60%", "54%", "6%", "30%"):
        assert share in found
    assert {"layer 0", "layer 1"} <= set(found)
    assert {"L0 post mb 0", "L1 page 2", "L1 k2", "k0"} <= set(found), "as far as there is room"
    assert "experts" in found
    assert "KV cache moved" not in found, "the legend names only what is seen"


def test_bars_say_what_they_are_when_pointed_at() -> None:
    root = svg(lambda: drawn({"cgopipe": cgopipe()}))
    assert len(notes(root)) == 42
    assert "L0 post mb 0: 2.00 s from 3.50 s, waited for load(0, k0)" in notes(root)
    assert all(group.get("shape-rendering") == "crispEdges" for group in groups(root, "bars"))


def test_nothing_lies_outside_the_picture() -> None:
    picture = drawn({"a": expert_major(), "b": expert_major(load_s=0.08)})
    assert picture.width == WIDTH
    box = picture.figure.get_tightbbox()
    assert 0 <= box.x0 <= box.x1 <= picture.width / 72
    assert 0 <= box.y0 <= box.y1 <= picture.height / 72


def test_timelines_share_one_axis() -> None:
    fast, slow = expert_major(compute_s=0.03), expert_major(load_s=0.1)
    ends = [max(right for _, right in tasks(drawn({"x": one}))) for one in (fast, slow)]
    assert ends[0] == pytest.approx(ends[1], abs=0.2), "alone, each takes the whole width"
    cpu, disk, slow_cpu, slow_disk = rows(drawn({"fast": fast, "slow": slow}))
    lengths = [max(right for _, right in (*cpu, *disk)), max(r for _, r in (*slow_cpu, *slow_disk))]
    assert lengths[0] / lengths[1] == pytest.approx(0.5, abs=0.01)


def test_bars_end_with_the_window() -> None:
    timeline = cgopipe()
    part = drawn({"part": timeline}, since_s=4.0, until_s=8.0)
    assert len(tasks(part)) == len(timeline.between(4, 8))
    ends = [
        (min(left for left, _ in tasks(one)), max(right for _, right in tasks(one)))
        for one in (part, drawn({"all": timeline}))
    ]
    assert ends[0] == ends[1]


def test_a_window_with_nothing_in_it_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing lies between"):
        drawn({"one": cgopipe()}, since_s=30.0)


def test_few_layers_show_the_last_pass_and_many_its_middle() -> None:
    short = expert_major(num_passes=3, num_layers=6)
    window = usual_window(short)
    assert (window.start_s, window.end_s) == short.pass_ends_s[1:]
    long = expert_major(num_passes=3, num_layers=32)
    window = usual_window(long)
    assert window.title == "layers 14 to 17 of the last pass"
    steps = {
        span.task.step
        for span in long.between(window.start_s, window.end_s)
        if span.task.kind is Kind.EXPERT
    }
    assert steps == {64 + layer for layer in (14, 15, 16, 17)}


def test_a_schedule_that_walks_several_times_shows_the_same_share_of_a_pass() -> None:
    """Each pass of it goes through the layers four times, one micro-batch after the other."""
    once = expert_major(num_passes=3, num_layers=32)
    walks = expert_major(num_passes=12, num_layers=32)
    walks = replace(walks, pass_ends_s=walks.pass_ends_s[3::4])
    window = usual_window(walks)
    assert window.title == "16 of 128 steps of the last pass"
    assert window.length_s == pytest.approx(4 * usual_window(once).length_s)


def test_twenty_thousand_tasks_are_a_small_file() -> None:
    timeline = expert_major(
        num_passes=2, num_layers=32, num_experts=160, load_s=3e-3, compute_s=2e-3
    )
    assert len(timeline.spans) > 20_000
    assert len(rendered(lambda: drawn({"all": timeline}, since_s=0.0))) < 250_000


@given(STEPS)
def test_there_are_never_more_than_two_bars_per_pixel(steps: list[Step]) -> None:
    spans = spans_of(steps)
    found = lane_bars(spans, spans[-1].end_s + 1, WIDTH_OF_LANE)
    assert len(found) <= 2 * WIDTH_OF_LANE
    assert all(0 < busy <= 1 and left < right for left, right, busy in found)


@given(STEPS)
def test_bars_of_narrow_spans_are_as_strong_as_the_lane_was_busy(steps: list[Step]) -> None:
    spans = spans_of([(idle, busy / 200, kind) for idle, busy, kind in steps])
    length_s = spans[-1].end_s + 1
    found = lane_bars(spans, length_s, WIDTH_OF_LANE)
    pixels = sum(span.seconds for span in spans) / length_s * WIDTH_OF_LANE
    assert sum((right - left) * busy for left, right, busy in found) == pytest.approx(pixels)


def test_a_pixel_between_wide_bars_is_full() -> None:
    gate = Span(Task(Kind.GATE, 0), "cpu", 4.3, 4.6)
    found = lane_bars([expert(0, 4.3), gate, expert(4.6, 10)], 10, 10)
    assert found[0] == (4, 5, pytest.approx(1))


def test_a_gap_of_a_pixel_stays_white() -> None:
    spans = [expert(k / 10, (k + 1) / 10) for k in range(100) if not 50 <= k < 70]
    found = lane_bars(spans, 10, 10)
    assert [(left, right) for left, right, _ in found] == [(0, 5), (7, 10)]
    assert [busy for *_, busy in found] == pytest.approx([1, 1])


def test_neighbours_meet_in_the_drawing() -> None:
    timeline = expert_major(num_layers=3, num_experts=37, load_s=0.007, compute_s=0.00713)
    computed, _ = rows(drawn({"busy": timeline}))
    assert len(computed) == 3 * 38
    for (_, right), (left, _) in pairwise(computed):
        assert left - right == pytest.approx(0, abs=1e-6)


def test_what_is_half_idle_is_half_as_strong() -> None:
    found = lane_bars([expert(k / 10, k / 10 + 0.05) for k in range(100)], 10, 10)
    assert found == [(0, 10, pytest.approx(0.5))]


def test_a_pixel_shows_what_most_of_it_is() -> None:
    spans = [expert(0, 0.3), expert(0.3, 0.9, Kind.CHUNK), expert(1, 1.6), expert(1.6, 1.8)]
    found = bars(spans, Window(start_s=0, end_s=10), 1.0)
    assert [bar.group for bar in found] == [WEIGHTS, EXPERTS]


@pytest.mark.parametrize(
    ("length_s", "unit", "labels"),
    [
        (20.0, "seconds", ["0", "2", "4"]),
        (1.0, "milliseconds", ["0", "100", "200"]),
        (0.06, "milliseconds", ["0", "5", "10"]),
        (3e-5, "microseconds", ["0", "5", "10"]),
        (36000.0, "seconds", ["0", "5000", "10000"]),
    ],
)
def test_ticks_are_round(length_s: float, unit: str, labels: list[str]) -> None:
    span = Span(Task(Kind.EXPERT, 0), "cpu", 0, length_s)
    timeline = Timeline(num_layers=1, pass_ends_s=(length_s,), spans=(span,))
    found = svg_texts(svg(lambda: drawn({"x": timeline})))
    assert f"{unit} from the left edge" in found
    assert set(labels) <= set(found)


@given(st.floats(1e-6, 1e7))
def test_there_are_a_few_ticks_within_the_axis(length_s: float) -> None:
    tick_s, _, _ = time_axis(length_s)
    assert 4 <= length_s / tick_s + 1 <= 14
