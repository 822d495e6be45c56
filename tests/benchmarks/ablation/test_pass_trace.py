"""Where the time of a pass goes."""

import pytest

from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span, Timeline
from tests.benchmarks.ablation.pass_trace import PassTrace, pass_traces

CHOSEN, BEGUN, IN_VAIN = 1, 2, 3


def on(lane: str, kind: Kind, start_s: float, end_s: float, expert: int | None = None) -> Span:
    return Span(Task(kind, 0, expert=expert), lane, start_s, end_s)


def test_waits_belong_to_experts_that_were_begun_early_or_not_and_the_rest_to_launching() -> None:
    spans = (
        on("dram->vram", Kind.CHUNK, 0, 1, IN_VAIN),
        on("gpu", Kind.GATE, 1, 3),
        on("dram->vram", Kind.CHUNK, 2, 5, BEGUN),
        on("dram->vram", Kind.CHUNK, 5, 9, CHOSEN),
        on("gpu", Kind.EXPERT, 6, 7, BEGUN),  # waited from 3 to 5, then for its launch
        on("gpu", Kind.EXPERT, 9, 10, CHOSEN),
        on("gpu", Kind.COMBINE, 11, 12),
    )
    timeline = Timeline(num_layers=1, pass_ends_s=(13,), spans=spans)
    (trace,) = pass_traces(timeline)
    assert trace == PassTrace(
        computing_s=5,
        waiting_s=2,
        waiting_begun_s=2,
        launching_s=1 + 1 + 1 + 1,
        needed_s=7,
        in_vain_s=1,
    )
    total = trace.computing_s + trace.waiting_s + trace.waiting_begun_s + trace.launching_s
    assert total == pytest.approx(timeline.length_s)
    assert trace.least_s == 9
