"""Spans of a lane as bars of a drawing, as many as its width can show."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor

from moebatch.report.figure import BLUE, GREEN, INK, ORANGE
from moebatch.report.gantt_window import Window
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span

_NARROW = 1.0
"""Bars below this width are drawn together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Kinds of tasks that are drawn alike."""

    name: str
    fill: str
    ink: str = "#ffffff"
    kinds: tuple[Kind, ...]


ATTENTION = Group(name="attention", fill=BLUE, kinds=(Kind.ATTEND, Kind.ATTN))
PROJECTIONS = Group(name="projections", fill="#8fcdf2", ink=INK, kinds=(Kind.PRE, Kind.OUT))
GATES = Group(name="gate, combine", fill="#8c5a9e", kinds=(Kind.GATE, Kind.COMBINE))
EXPERTS = Group(name="experts", fill=ORANGE, kinds=(Kind.POST, Kind.EXPERT, Kind.DENSE))
WEIGHTS = Group(
    name="weights moved", fill=GREEN, kinds=(Kind.CHUNK, Kind.FETCH, Kind.PAGE, Kind.BLOCK)
)
STAGING = Group(name="weights pinned", fill="#a5d9c0", ink=INK, kinds=(Kind.STAGE,))
HIDDEN = Group(name="hidden states moved", fill="#7d7d7d", kinds=(Kind.OFF, Kind.LOAD))
CACHE = Group(
    name="KV cache moved",
    fill="#f0c03c",
    ink=INK,
    kinds=(Kind.KV_READ, Kind.KV_UP, Kind.KV_DOWN, Kind.KV_WRITE),
)
"""People who see few colours distinguish these, too: they differ in lightness."""
GROUPS = (ATTENTION, PROJECTIONS, GATES, EXPERTS, WEIGHTS, STAGING, HIDDEN, CACHE)
_Columns = dict[int, dict[Group | None, float]]
"""By pixel: how much of it each group takes with narrow spans, and wide ones under None."""
_GROUP_OF: Mapping[Kind, Group] = {kind: group for group in GROUPS for kind in group.kinds}


def group_of(task: Task) -> Group:
    """How a task is drawn."""
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
        left = (max(span.start_s, window.start_s) - window.start_s) * pixels_per_s
        right = (min(span.end_s, window.end_s) - window.start_s) * pixels_per_s
        if right - left >= _NARROW:
            wide.append(_wide(left, right, span, wide[-1] if wide else None))
            _gather(columns, left, right, None)
        elif right > left:
            _gather(columns, left, right, group_of(span.task))
    return [*_merged(columns), *wide]


def _wide(left: float, right: float, span: Span, last: Bar | None) -> Bar:
    group = group_of(span.task)
    touches = last is not None and last.group is group and left - last.right < _NARROW
    shade = touches and last is not None and not last.is_shaded
    return Bar(left=left, right=right, group=group, span=span, is_shaded=shade)


def _gather(columns: _Columns, left: float, right: float, group: Group | None) -> None:
    """Adds what a bar takes of the first and of the last pixel that it touches."""
    for column in {floor(left), ceil(right) - 1}:
        columns[column][group] += min(right, column + 1) - max(left, column)


def _merged(columns: _Columns) -> Iterator[Bar]:
    """Bars of pixels in which narrow spans lie."""
    last: Bar | None = None
    for column, widths in sorted(columns.items()):
        groups = [group for group in widths if group is not None]
        if not groups:
            continue
        group = max(groups, key=lambda group: widths[group])
        busy = min(1.0, sum(widths.values()))
        if last and last.right == column and last.group is group:
            mean = (last.busy * last.width + busy) / (last.width + 1)
            last = replace(last, right=column + 1, busy=mean)
            continue
        if last:
            yield last
        last = Bar(left=column, right=column + 1, group=group, busy=busy)
    if last:
        yield last
