"""What lanes did, added up span by span, is what the timeline says; and so is its JSON."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.plan.simulation.simulation import timeline_json
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.statistics import NUM_LONGEST, LaneStatistics, Statistics, in_order
from moebatch.schedule.timeline.timeline import LAUNCH, Launch, Span, Timeline
from tests.report.timelines import cgopipe, expert_major

REASONS = (None, "chunk(1, e2)", "chunk(7, e0)", "gate(3, k1)")
STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(REASONS)),
    min_size=1,
    max_size=30,
)
"""Idle and busy seconds, and what was waited for: whole numbers, so that sums are exact."""


def spans_of(steps: list[tuple[int, int, str | None]]) -> list[Span]:
    spans, now = [], 0
    for number, (idle, busy, reason) in enumerate(steps):
        start, now = now + idle, now + idle + busy
        task = Task(Kind.EXPERT, number, expert=0)
        spans.append(Span(task, "cpu", start, now, waited_for=reason))
    return spans


def timeline_of(spans: list[Span]) -> Timeline:
    return Timeline(num_layers=1, pass_ends_s=(spans[-1].end_s,), spans=tuple(spans))


@given(STEPS)
def test_sums_agree_with_the_timeline(steps: list[tuple[int, int, str | None]]) -> None:
    timeline = timeline_of(spans_of(steps))
    lane = Statistics.of(timeline).lanes["cpu"]
    bubbles = list(timeline.bubbles("cpu"))
    assert lane.busy_s == timeline.busy_s("cpu") == sum(busy for _, busy, _ in steps)
    assert lane.bubbles_s == sum(bubble.seconds for bubble in bubbles)
    assert lane.busy_s + lane.bubbles_s == timeline.length_s
    assert lane.longest == sorted(bubbles, key=lambda bubble: -bubble.seconds)[:5]


@given(STEPS, st.integers(0, 200))
def test_what_was_earlier_does_not_count(
    steps: list[tuple[int, int, str | None]], since: int
) -> None:
    timeline = timeline_of(spans_of(steps))
    since = min(since, int(timeline.length_s))
    statistics = Statistics.of(timeline, since_s=since)
    lane = statistics.lanes["cpu"]
    assert lane.busy_s == timeline.busy_s("cpu", since_s=since)
    assert lane.busy_s + lane.bubbles_s == statistics.length_s == timeline.length_s - since
    assert all(bubble.start_s >= since for bubble in lane.longest)


def test_nothing_counts_after_the_end() -> None:
    lane = LaneStatistics(lane="cpu", until_s=10)
    lane.add(Span(Task(Kind.EXPERT, 0), "cpu", 8, 12))
    lane.add(Span(Task(Kind.EXPERT, 1), "cpu", 15, 20))
    assert (lane.busy_s, lane.bubbles_s, lane.free_s) == (2, 8, 10)


def test_bubbles_are_added_up_by_kind_of_reason() -> None:
    steps = [(1, 1, None), (2, 1, "chunk(1, e2)"), (3, 1, "chunk(7, e0)"), (4, 1, "gate(3, k1)")]
    lane = Statistics.of(timeline_of(spans_of(steps))).lanes["cpu"]
    assert lane.idle_s == {"launch": 1, "chunk": 5, "gate": 4}
    assert lane.main_reason == "chunk"


def test_nothing_holds_a_task_up_before_its_launch() -> None:
    """Between passes the thread that launches computes logits and forms the next pass."""
    lane = LaneStatistics(lane="cpu")
    for number, launch in enumerate([Launch(3, LAUNCH), Launch(9, LAUNCH), Launch(17, "kv_up(1)")]):
        start_s = 5 * (number + 1)
        task = Task(Kind.ATTEND, number, 0)
        lane.add(Span(task, "cpu", start_s, start_s + 1, (), "kv_up(1)", launch))
    assert lane.idle_s == {LAUNCH: 3 + 3, "kv_up": 2 + 1 + 4}
    assert {(one.start_s, one.end_s) for one in lane.longest} == {
        (0, 3),
        (3, 5),
        (6, 9),
        (9, 10),
        (11, 15),
    }


def test_only_the_longest_bubbles_are_kept() -> None:
    lane = LaneStatistics(lane="cpu")
    for span in spans_of([(k * 7 % 11, 1, None) for k in range(1000)]):
        lane.add(span)
    assert [bubble.seconds for bubble in lane.longest] == [10] * NUM_LONGEST
    assert all(earlier.start_s < later.start_s for earlier, later in pairwise(lane.longest))
    assert lane.num_tasks == 1000


def test_many_long_bubbles_of_one_kind_hide_none_of_another() -> None:
    steps = [*((9, 1, None) for _ in range(20)), (2, 1, "kv_up(1)"), (1, 1, "chunk(7, e0)")]
    lane = Statistics.of(timeline_of(spans_of(steps))).lanes["cpu"]
    assert [bubble.seconds for bubble in lane.longest] == [9] * NUM_LONGEST
    assert [bubble.seconds for bubble in lane.apart_from(LAUNCH).longest] == [2, 1]


def test_without_an_end_the_last_task_is_it() -> None:
    statistics = Statistics(num_layers=1)
    assert (statistics.length_s, statistics.bottleneck) == (0, None)
    statistics.add(Span(Task(Kind.EXPERT, 0), "cpu", 0, 3))
    statistics.add(Span(Task(Kind.CHUNK, 1), "disk->dram", 0, 4))
    assert statistics.length_s == 4
    assert statistics.share("cpu") == 0.75
    assert statistics.rest_s("cpu") == 1
    assert statistics.bottleneck == "disk->dram"
    statistics.until_s = 8
    assert statistics.share("cpu") == 0.375
    assert statistics.rest_s("disk->dram") == 4


def test_shares_of_the_cgopipe_example() -> None:
    statistics = Statistics.of(cgopipe())
    busy_s = {name: round(lane.busy_s, 9) for name, lane in statistics.lanes.items()}
    expected = {"gpu": 18, "cpu": 12, "dram->vram": 10.8, "vram->dram": 1.2, "staging": 6}
    assert busy_s == expected
    assert statistics.names == ["gpu", "cpu", "dram->vram", "vram->dram", "staging"]
    assert statistics.main_lanes == ["gpu", "cpu"]
    assert statistics.longest_waits(["gpu"], 1)[0].seconds == 1.5


def test_unknown_lanes_are_last() -> None:
    assert in_order(("tape", "disk->dram", "gpu")) == ["gpu", "disk->dram", "tape"]


def test_the_steady_state_leaves_the_first_pass_out() -> None:
    timeline = expert_major(num_passes=3)
    first, *rest = timeline.pass_s
    assert first > rest[0]
    assert timeline.steady_pass_s == pytest.approx(sum(rest) / 2)
    assert timeline.steady_since_s == first
    only = expert_major(num_passes=1)
    assert (only.steady_since_s, only.steady_pass_s) == (0, only.length_s)


def test_json_has_every_lane_and_its_bubbles() -> None:
    data = json.loads(json.dumps(timeline_json(cgopipe())))
    assert data["steady_pass_s"] == 20
    assert data["bottleneck"] == "gpu"
    gpu = data["lanes"]["gpu"]
    assert gpu["share"] == pytest.approx(0.9)
    assert gpu["bubbles"]["total_s"] == pytest.approx(2)
    assert list(gpu["bubbles"]["waited_for_s"]) == ["load"]
    assert gpu["bubbles"]["longest"][0] == {
        "start_s": 2,
        "seconds": 1.5,
        "before": "post(0, k0)",
        "waited_for": "load(0, k0)",
    }


def test_json_times_of_a_lane_add_up() -> None:
    data = timeline_json(expert_major())
    length_s = data["length_s"] - data["steady_since_s"]
    for lane in data["lanes"].values():
        parts = lane["busy_s"] + lane["bubbles"]["total_s"] + lane["rest_s"]
        assert parts == pytest.approx(length_s)
