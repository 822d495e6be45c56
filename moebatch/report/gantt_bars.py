"""Spans of a lane as bars of a drawing, as many as its width can show."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor

from moebatch.report.gantt_window import Window
from moebatch.report.svg import INK
from moebatch.report.time_axis import TimeAxis
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span

_NARROW = 1.0
"""Bars below this width are drawn together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Kinds of tasks that are drawn alike."""

    name: str
    fill: str
    shade: str
    """For every other task of a row, so that neighbours are told apart without lines, which would
    hide bubbles."""
    ink: str = "#ffffff"


ATTENTION = Group(name="attention", fill="#0072b2", shade="#006299")
PROJECTIONS = Group(name="projections", fill="#8fcdf2", shade="#7bb0d0", ink=INK)
GATES = Group(name="gate, combine", fill="#8c5a9e", shade="#784d88")
EXPERTS = Group(name="experts", fill="#d55e00", shade="#b75100")
WEIGHTS = Group(name="weights moved", fill="#00936a", shade="#007e5b")
STAGING = Group(name="weights pinned", fill="#a5d9c0", shade="#8ebba5", ink=INK)
HIDDEN = Group(name="hidden states moved", fill="#7d7d7d", shade="#6c6c6c")
CACHE = Group(name="KV cache moved", fill="#f0c03c", shade="#cea534", ink=INK)
"""Told apart by people who see few colours, too: they differ in lightness."""
GROUPS = (ATTENTION, PROJECTIONS, GATES, EXPERTS, WEIGHTS, STAGING, HIDDEN, CACHE)
_GROUP_OF: Mapping[Kind, Group] = {
    Kind.ATTEND: ATTENTION,
    Kind.ATTN: ATTENTION,
    Kind.PRE: PROJECTIONS,
    Kind.OUT: PROJECTIONS,
    Kind.GATE: GATES,
    Kind.COMBINE: GATES,
    Kind.POST: EXPERTS,
    Kind.EXPERT: EXPERTS,
    Kind.DENSE: EXPERTS,
    Kind.CHUNK: WEIGHTS,
    Kind.FETCH: WEIGHTS,
    Kind.PAGE: WEIGHTS,
    Kind.BLOCK: WEIGHTS,
    Kind.STAGE: STAGING,
    Kind.OFF: HIDDEN,
    Kind.LOAD: HIDDEN,
    Kind.KV_READ: CACHE,
    Kind.KV_UP: CACHE,
    Kind.KV_DOWN: CACHE,
    Kind.KV_WRITE: CACHE,
}


def group_of(task: Task) -> Group:
    """How a task is drawn."""
    return _GROUP_OF[task.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A rectangle of a row."""

    left: float
    right: float
    group: Group
    busy: float = 1.0
    """Part of it in which the lane was busy, 0..1: below 1 only where spans are drawn as one."""
    span: Span | None = None
    """What it shows, if that is a single one."""
    is_shaded: bool = False

    @property
    def fill(self) -> str:
        """Its colour."""
        return self.group.shade if self.is_shaded else self.group.fill

    @property
    def width(self) -> float:
        """In units of the drawing."""
        return self.right - self.left


def bars(spans: Iterable[Span], window: Window, axis: TimeAxis) -> list[Bar]:
    """Bars of a lane within a window whose start is the left end of the axis.

    Spans narrower than a pixel are gathered by pixel: each shows the group that has most of it, and
    neighbours of one group are one bar. So there are never more than two bars per pixel.
    """
    wide: list[Bar] = []
    columns: dict[int, dict[str, float]] = {}
    beside: dict[int, float] = {}
    for span in spans:
        left = axis.x(span.start_s - window.start_s)
        right = axis.x(min(span.end_s, window.end_s) - window.start_s)
        if right - left >= _NARROW:
            wide.append(_wide(left, right, span, wide[-1] if wide else None))
            _cover_ends(beside, left, right)
        elif right > left:
            _gather(columns, left, right, group_of(span.task).name)
    return [*_merged(columns, beside), *wide]


def _wide(left: float, right: float, span: Span, last: Bar | None) -> Bar:
    group = group_of(span.task)
    bar = Bar(left=left, right=right, group=group, span=span)
    if last is None or last.group is not group or left - last.right >= _NARROW:
        return bar
    return replace(bar, is_shaded=not last.is_shaded)


def _cover_ends(beside: dict[int, float], left: float, right: float) -> None:
    """Parts of the first and the last pixel that a wide bar takes."""
    first, last = floor(left), floor(right)
    beside[first] = beside.get(first, 0.0) + min(right, first + 1) - left
    if last > first:
        beside[last] = beside.get(last, 0.0) + right - last


def _gather(columns: dict[int, dict[str, float]], left: float, right: float, group: str) -> None:
    for column in range(floor(left), ceil(right)):
        widths = columns.setdefault(column, {})
        width = min(right, column + 1) - max(left, column)
        widths[group] = widths.get(group, 0.0) + width


def _merged(
    columns: Mapping[int, Mapping[str, float]], beside: Mapping[int, float]
) -> Iterator[Bar]:
    by_name = {group.name: group for group in GROUPS}
    last: Bar | None = None
    for column in sorted(columns):
        widths = columns[column]
        group = by_name[max(widths, key=lambda name: widths[name])]
        busy = min(1.0, sum(widths.values()) + beside.get(column, 0.0))
        if last and last.right == column and last.group is group:
            mean = (last.busy * last.width + busy) / (last.width + 1)
            last = replace(last, right=column + 1, busy=mean)
            continue
        if last:
            yield last
        last = Bar(left=column, right=column + 1, group=group, busy=busy)
    if last:
        yield last
