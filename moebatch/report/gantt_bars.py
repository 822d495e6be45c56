"""Spans of a lane as bars of a drawing, as many as its width can show."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor

from moebatch.report.figure import BLUE, GREEN, INK, ORANGE
from moebatch.report.gantt_window import Window
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span

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
WEIGHTS = Group("weights moved", GREEN, _WHITE, (Kind.CHUNK, Kind.FETCH, Kind.PAGE, Kind.BLOCK))
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
