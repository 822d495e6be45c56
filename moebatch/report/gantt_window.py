"""Which part of a timeline a Gantt picture shows."""

from dataclasses import dataclass

from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline

_MOST_LAYERS = 6
"""As many are shown whole."""
_MIDDLE = 4
"""Layers of the middle of a pass that has more."""
_ATTENTION = (Kind.ATTEND, Kind.PRE, Kind.ATTN, Kind.OUT)
_COMPUTING = {*_ATTENTION, Kind.POST, Kind.GATE, Kind.EXPERT, Kind.COMBINE, Kind.DENSE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A part of a timeline, in its seconds."""

    start_s: float
    end_s: float
    title: str = ""
    """What it is, such as ``layers 14 to 17 of the last pass``; "" if that needs no explanation."""

    @property
    def length_s(self) -> float:
        """Seconds from its start to its end."""
        return self.end_s - self.start_s


def layer_starts(timeline: Timeline, window: Window) -> list[tuple[float, int]]:
    """When the computation of each step begins, and its number, in order of time: of steps that
    begin within a window, its end excluded. The step before need not have ended."""
    first: dict[int, float] = {}
    for span in timeline.spans:
        if span.task.kind in _COMPUTING:
            step = span.task.step
            first[step] = min(span.start_s, first.get(step, span.start_s))
    starts = ((start_s, step) for step, start_s in first.items())
    return sorted(start for start in starts if window.start_s <= start[0] < window.end_s)


def usual_window(timeline: Timeline) -> Window:
    """The last pass, or its middle if the model has many layers: the same share of a pass for every
    schedule, so that pictures compare, though some walk through the layers several times."""
    ends = (0.0, *timeline.pass_ends_s)
    number = max(0, len(timeline.pass_ends_s) - 1)
    last = Window(start_s=ends[number], end_s=ends[-1], title="last pass" if number else "")
    starts = layer_starts(timeline, last)
    count = round(len(starts) * _MIDDLE / timeline.num_layers)
    if timeline.num_layers <= _MOST_LAYERS or not 0 < count < len(starts):
        return last
    first = (len(starts) - count) // 2
    (start_s, step), (end_s, _) = starts[first], starts[first + count]
    layer = step % timeline.num_layers
    shown = f"layers {layer} to {layer + count - 1}"
    if len(starts) != timeline.num_layers:
        shown = f"{count} of {len(starts)} steps"
    return Window(start_s=start_s, end_s=end_s, title=f"{shown} of the last pass")


def shown_window(timeline: Timeline, since_s: float | None, until_s: float | None) -> Window:
    """The part of a timeline that is shown: the usual one if neither end is given."""
    if since_s is None and until_s is None:
        return usual_window(timeline)
    end_s = timeline.length_s if until_s is None else min(until_s, timeline.length_s)
    return Window(start_s=min(max(0.0, since_s or 0.0), end_s), end_s=end_s)
