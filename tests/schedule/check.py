"""What every timeline must keep to, simulated or executed."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span, Timeline

_WEIGHTS = (Kind.PAGE, Kind.BLOCK)


def check_timeline(timeline: Timeline, *, clock_s: float = 1e-9) -> None:
    """Asserts that lanes run one task at a time, that tasks begin after what they wait for, that
    experts run after they have arrived, and that nothing is overwritten while in use.

    `clock_s` is how far apart two readings of the clock may be for one moment.
    """
    for lane in timeline.lanes:
        _check_lane(timeline.on(lane), clock_s)
    # Of what comes again, the first time.
    ends = {span.task: span.end_s for span in reversed(timeline.spans)}
    for span in timeline.spans:
        _check_waits(span, ends, clock_s)
    for spans in _by_slot(timeline.spans).values():
        _check_slot(spans, timeline.num_layers, clock_s)
    _check_halves(timeline, clock_s)


def _check_lane(spans: Sequence[Span], clock_s: float) -> None:
    for first, second in pairwise(spans):
        assert first.end_s <= second.start_s + clock_s, (
            f"{first.lane} runs {first.task} and {second.task} at once"
        )


def _check_waits(span: Span, ends: Mapping[Task, float], clock_s: float) -> None:
    for task in span.task.after:
        if task in ends:
            assert ends[task] <= span.start_s + clock_s, f"{span.task} began before {task} ended"


def _by_slot(spans: Sequence[Span]) -> Mapping[tuple[Kind, int], list[tuple[Span, int]]]:
    """Spans of every slot, in order, with the expert that is in it; slots of main memory under a
    GPU apart."""
    found: dict[tuple[Kind, int], list[tuple[Span, int]]] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        kind = Kind.FETCH if span.task.kind is Kind.FETCH else Kind.CHUNK
        for expert, slot in zip(span.task.experts, span.slots, strict=False):
            found.setdefault((kind, slot), []).append((span, expert))
    return found


def _check_slot(spans: Sequence[tuple[Span, int]], num_layers: int, clock_s: float) -> None:
    """An expert runs from its slot between the arrival of its last chunk and the first chunk of
    the next one. A slot into which nothing was ever sent belongs to a resident."""
    holder: tuple[int, int] | None = None
    busy_until_s = arrived_s = 0.0
    for span, expert in spans:
        key = (span.task.step % num_layers, expert)
        if span.task.kind is Kind.EXPERT:
            assert holder in (None, key), f"{span.task} ran from a slot that holds {holder}"
            assert span.start_s >= arrived_s - clock_s, f"{span.task} ran before it had arrived"
            holder = key
        elif key != holder:
            assert span.start_s >= busy_until_s - clock_s, f"{span.task} overwrites {holder}"
            holder = key
        if span.task.kind is not Kind.EXPERT:
            arrived_s = span.end_s
        busy_until_s = max(busy_until_s, span.end_s)


def _check_halves(timeline: Timeline, clock_s: float) -> None:
    """Weights of a layer go up while those of the layer before are in use, and not earlier. Where a
    pass leaves out other layers than the one before, some have come in vain, and come again."""
    posts = [span for span in timeline.spans if span.task.kind is Kind.POST]
    moves = [span for span in timeline.spans if span.task.kind in _WEIGHTS]
    halves = [span for span in moves if not span.task.page]
    for old, new in zip(halves, halves[2:], strict=False):
        again = (span for span in halves if span.task == old.task and span.start_s > old.start_s)
        over_s = min((span.start_s for span in again), default=float("inf"))
        used = [s.end_s for s in posts if s.task.step == old.task.step and s.start_s < over_s]
        assert max(used, default=0.0) <= new.start_s + clock_s, f"{new.task} came too early"
    arrived: dict[int, float] = {}
    for span in moves:
        arrived[span.task.step] = max(arrived.get(span.task.step, 0.0), span.end_s)
    for span in posts:
        assert arrived.get(span.task.step, 0.0) <= span.start_s + clock_s, (
            f"{span.task} ran before its weights had arrived"
        )
