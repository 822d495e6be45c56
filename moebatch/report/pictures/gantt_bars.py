"""Spans of a lane as bars of a drawing, as many as its width can show."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor

from moebatch.report.pictures.figure import BLUE, GREEN, INK, ORANGE
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span, Timeline

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


_NARROW = 1.0
"""Bars below this width are drawn together."""


@dataclass(frozen=True, slots=True)
class Group:
    """Kinds of tasks that are drawn alike."""

    name: str
    fill: str
    ink: str
    kinds: tuple[Kind, ...]


_WHITE = "#ffffff"
EXPERTS = Group("experts", ORANGE, _WHITE, (Kind.POST, Kind.EXPERT, Kind.DENSE))
_MOVED = (Kind.CHUNK, Kind.FETCH, Kind.PAGE, Kind.BLOCK, Kind.LAYER_UP)
WEIGHTS = Group("weights moved", GREEN, _WHITE, _MOVED)
_CACHE = (Kind.KV_READ, Kind.KV_UP, Kind.KV_DOWN, Kind.KV_WRITE)
GROUPS = (
    Group("attention", BLUE, _WHITE, (Kind.ATTEND, Kind.ATTN)),
    Group("projections", "#8fcdf2", INK, (Kind.PRE, Kind.OUT)),
    Group("gate, combine", "#8c5a9e", _WHITE, (Kind.GATE, Kind.COMBINE)),
    EXPERTS,
    WEIGHTS,
    Group("weights pinned", "#a5d9c0", INK, (Kind.STAGE,)),
    Group("hidden states moved", "#7d7d7d", _WHITE, (Kind.OFF, Kind.LOAD)),
    Group("KV cache moved", "#f0c03c", INK, _CACHE),
)
"""Distinct for colour-blind readers, too: they differ in lightness."""
_Columns = dict[int, dict[Group | None, float]]
"""By pixel: how much of it each group takes with narrow spans, and wide ones under None."""
_GROUP_OF: Mapping[Kind, Group] = {kind: group for group in GROUPS for kind in group.kinds}


def group_of(task: Task) -> Group:
    return _GROUP_OF[task.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A rectangle of a row, in pixels from its left end."""

    left: float
    right: float
    group: Group
    busy: float = 1.0
    """Part of it in which the lane was busy, 0..1: below 1 only where spans are drawn as one."""
    span: Span | None = None
    """What it shows, if that is a single one."""
    is_shaded: bool = False
    """Every other one of bars that touch: so they are distinct without lines, which would hide
    bubbles."""

    @property
    def width(self) -> float:
        """In pixels."""
        return self.right - self.left


def bars(spans: Iterable[Span], window: Window, pixels_per_s: float) -> list[Bar]:
    """Bars of a lane within a window whose start is the left end of the row.

    Spans narrower than a pixel are gathered by pixel: each shows the group that has most of it, and
    neighbours of one group are one bar. So there are never more than two bars per pixel.
    """
    wide: list[Bar] = []
    columns: _Columns = defaultdict(lambda: defaultdict(float))
    for span in spans:
        group = group_of(span.task)
        left = (max(span.start_s, window.start_s) - window.start_s) * pixels_per_s
        right = (min(span.end_s, window.end_s) - window.start_s) * pixels_per_s
        if right - left >= _NARROW:
            touches = bool(wide) and left - wide[-1].right < _NARROW
            shade = touches and wide[-1].group is group and not wide[-1].is_shaded
            wide.append(Bar(left=left, right=right, group=group, span=span, is_shaded=shade))
            _gather(columns, left, right, None)
        elif right > left:
            _gather(columns, left, right, group)
    return [*_merged(columns), *wide]


def _gather(columns: _Columns, left: float, right: float, group: Group | None) -> None:
    """Adds what a bar takes of the first and of the last pixel that it touches."""
    for column in {floor(left), ceil(right) - 1}:
        columns[column][group] += min(right, column + 1) - max(left, column)


def _merged(columns: _Columns) -> Iterator[Bar]:
    """Bars of pixels in which narrow spans lie, neighbours of one group together."""
    last: Bar | None = None
    for column, widths in sorted(columns.items()):
        groups = [group for group in widths if group is not None]
        if not groups:
            continue
        group, busy = max(groups, key=lambda group: widths[group]), min(1.0, sum(widths.values()))
        left: float = column
        if last and last.right == column and last.group is group:
            left, busy = last.left, (last.busy * last.width + busy) / (last.width + 1)
        elif last:
            yield last
        last = Bar(left=left, right=column + 1, group=group, busy=busy)
    if last:
        yield last
