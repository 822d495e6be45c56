"""Timelines as Chrome traces, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process for each timeline, so that predicted and measured lie below each other; in it a row for
each lane, and one that says what the busiest lane waited for.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebatch.report.task_names import bubble_text, task_label, wait_text
from moebatch.schedule.task import reason_kind
from moebatch.schedule.timeline.statistics import Statistics, in_order
from moebatch.schedule.timeline.timeline import Bubble, Span, Timeline
from moebatch.spec.files.text_file import write_bytes

_Event = dict[str, Any]


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace of timelines by name, as plain data. Moments are in microseconds, to the nanosecond
    that a viewer keeps; `args.seconds` of a task is exact."""
    events: list[_Event] = []
    for pid, (name, timeline) in enumerate(timelines.items(), 1):
        events += _process(pid, name, timeline)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_chrome_trace(path: Path, timelines: Mapping[str, Timeline]) -> None:
    """Writes the trace as JSON, compressed if the name ends in ``.gz``.

    Raises StorageError.
    """
    text = json.dumps(chrome_trace(timelines), separators=(",", ":"), allow_nan=False)
    data = text.encode()
    # Without a time of its own the same timeline is the same file.
    write_bytes(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _process(pid: int, name: str, timeline: Timeline) -> Iterator[_Event]:
    yield _name(pid, 0, "process_name", name=name)
    yield _name(pid, 0, "process_sort_index", sort_index=pid)
    busiest = Statistics.of(timeline).bottleneck
    tid = 0
    for lane in in_order(timeline.lanes):
        tid += 1
        yield from _thread(pid, tid, lane)
        for span in timeline.on(lane):
            yield _task(pid, tid, span, timeline.num_layers)
        if lane == busiest:
            tid += 1
            yield from _thread(pid, tid, f"{lane} waits")
            for bubble in timeline.bubbles(lane):
                yield _wait(pid, tid, bubble, timeline.num_layers)
    for number, end_s in enumerate(timeline.pass_ends_s):
        name = f"end of pass {number}"
        yield {"ph": "i", "s": "p", "name": name, "pid": pid, "tid": 1, "ts": _us(end_s)}


def _thread(pid: int, tid: int, name: str) -> Iterator[_Event]:
    yield _name(pid, tid, "thread_name", name=name)
    yield _name(pid, tid, "thread_sort_index", sort_index=tid)


def _name(pid: int, tid: int, what: str, **args: str | int) -> _Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _task(pid: int, tid: int, span: Span, num_layers: int) -> _Event:
    task = span.task
    args = {
        "step": task.step,
        "walk": task.step // num_layers,
        "layer": task.step % num_layers,
        "micro_batch": task.micro_batch,
        "experts": list(task.experts) or None,
        "page": task.page,
        "chunk": task.part,
        "slots": list(span.slots) or None,
        "waited_for": span.waited_for,
    }
    return _complete(pid, tid, span, task_label(task, num_layers), str(task.kind), args)


def _wait(pid: int, tid: int, bubble: Bubble, num_layers: int) -> _Event:
    words = wait_text(reason_kind(bubble.waited_for))
    args = {"before": bubble_text(bubble, num_layers)}
    return _complete(pid, tid, bubble, words, "wait", args)


def _complete(
    pid: int, tid: int, part: Span | Bubble, name: str, kind: str, args: _Event
) -> _Event:
    # Both ends are rounded, not the length: so neighbours meet and never overlap.
    start_us = _us(part.start_s)
    args = {**args, "seconds": part.seconds}
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": round(_us(part.end_s) - start_us, 3),
        "args": {key: value for key, value in args.items() if value is not None},
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
