"""Timelines made by hand."""

from moebatch.schedule.lanes import lane_of
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span, Timeline

_CGOPIPE = """
Pre(0,0) 0-1 | Off(0,0) 1-1.2 | Attn(0,0) 1.2-3.2 | Stage(1,0) 0-1 | Pre(0,1) 1-2
Off(0,1) 2-2.2 | Attn(0,1) 3.2-5.2 | Stage(1,1) 1-2 | Load(0,0) 3.2-3.5 | Page(1,0) 3.5-5
Post(0,0) 3.5-5.5 | Pre(0,2) 5.5-6.5 | Off(0,2) 6.5-6.7 | Attn(0,2) 6.7-8.7 | Stage(1,2) 2-3
Load(0,1) 5.2-5.5 | Page(1,1) 5.5-7 | Post(0,1) 6.5-8.5 | Pre(1,0) 8.5-9.5 | Off(1,0) 9.5-9.7
Attn(1,0) 9.7-11.7 | Stage(2,0) 5-6 | Load(0,2) 8.7-9 | Page(1,2) 9-10.5 | Post(0,2) 9.5-11.5
Pre(1,1) 11.5-12.5 | Off(1,1) 12.5-12.7 | Attn(1,1) 12.7-14.7 | Stage(2,1) 7-8
Load(1,0) 11.7-12 | Page(2,0) 12-13.5 | Post(1,0) 12.5-14.5 | Pre(1,2) 14.5-15.5
Off(1,2) 15.5-15.7 | Attn(1,2) 15.7-17.7 | Stage(2,2) 10.5-11.5 | Load(1,1) 14.7-15
Page(2,1) 15-16.5 | Post(1,1) 15.5-17.5 | Load(1,2) 17.7-18 | Page(2,2) 18-19.5 | Post(1,2) 18-20
"""
_WAITS = {
    "Post(0,0)": "load(0, k0)",
    "Post(0,2)": "load(0, k2)",
    "Post(1,2)": "load(1, k2)",
    "Attn(0,2)": "off(0, k2)",
    "Load(0,2)": "attn(0, k2)",
}


def cgopipe() -> Timeline:
    """MoE-Lightning's pipeline for two layers and three micro-batches: GPU 18 of 20 s busy."""
    spans = [
        _span(entry.strip()) for row in _CGOPIPE.strip().split("\n") for entry in row.split("|")
    ]
    return Timeline(num_layers=2, pass_ends_s=(20.0,), spans=tuple(spans))


def _span(entry: str) -> Span:
    name, _, times = entry.partition(" ")
    kind, _, numbers = name.rstrip(")").partition("(")
    step, number = map(int, numbers.split(","))
    paged = kind in ("Stage", "Page")
    task = Task(
        Kind(kind.lower()),
        step,
        micro_batch=None if paged else number,
        page=number if paged else None,
    )
    start, _, end = times.partition("-")
    lane = lane_of(task.kind, "vram").name
    return Span(task, lane, float(start), float(end), waited_for=_WAITS.get(name))


def expert_major(
    *,
    num_passes: int = 3,
    num_layers: int = 8,
    num_experts: int = 4,
    load_s: float = 0.05,
    compute_s: float = 0.03,
    attend_s: float = 0.02,
    fill_s: float = 0.2,
) -> Timeline:
    """A CPU that waits for each expert from the disk, which never rests; the first pass takes
    `fill_s` longer."""
    spans: list[Span] = []
    ends: list[float] = []
    read_s, free_s = fill_s, 0.0
    for step in range(num_passes * num_layers):
        spans.append(Span(Task(Kind.ATTEND, step, 0), "cpu", free_s, free_s + attend_s))
        free_s += attend_s
        for expert in range(num_experts):
            chunk = Task(Kind.CHUNK, step, expert=expert, part=0)
            spans.append(Span(chunk, "disk->dram", read_s, read_s + load_s, slots=(expert,)))
            read_s += load_s
            start_s = max(free_s, read_s)
            reason = str(chunk) if read_s > free_s else None
            task = Task(Kind.EXPERT, step, expert=expert)
            spans.append(Span(task, "cpu", start_s, start_s + compute_s, (expert,), reason))
            free_s = start_s + compute_s
        if (step + 1) % num_layers == 0:
            ends.append(free_s)
    return Timeline(num_layers=num_layers, pass_ends_s=tuple(ends), spans=tuple(spans))
