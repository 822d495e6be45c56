"""Timelines as a Gantt picture: a row for each lane, bubbles white, one axis of time for all.

Timelines are drawn below each other from the same left edge, so that of two schedules for the same
layers the shorter one is the faster. The same timelines give the same text.
"""

from collections.abc import Iterator, Mapping
from math import ceil

from moebatch.report.gantt_bars import GROUPS, Group
from moebatch.report.gantt_panel import PALE, GanttPanel
from moebatch.report.gantt_window import windows
from moebatch.report.svg import line, rectangle, svg, text, text_width
from moebatch.report.time_axis import TimeAxis
from moebatch.schedule.timeline.timeline import Timeline

WIDTH = 1120
USUAL_TITLE = "What the lanes did"
_MARGIN, _LEFT, _PLOT = 24, 118, 930
_HEADER, _GAP, _FOOTER = 72, 18, 46
_GRID = "#ececec"


def gantt_svg(
    timelines: Mapping[str, Timeline],
    *,
    since_s: float | None = None,
    until_s: float | None = None,
    title: str = USUAL_TITLE,
) -> str:
    """The picture of one or several timelines by name.

    Args:
        since_s: first moment to be shown, in seconds of each timeline; without either end the last
            pass is shown, or a few layers in its middle if it has many.
        until_s: last moment to be shown.
        title: what is shown, such as the model and the machine.
    """
    assert timelines, "a picture needs a timeline"
    shown = windows(timelines, since_s, until_s)
    length_s = max(window.length_s for window in shown.values())
    assert length_s > 0, "nothing lies between the two moments"
    axis = TimeAxis(left=_LEFT, width=_PLOT, length_s=length_s)
    panels = [
        GanttPanel(name=name, timeline=timeline, window=shown[name], axis=axis)
        for name, timeline in timelines.items()
    ]
    bottom = _HEADER + ceil(sum(panel.height + _GAP for panel in panels))
    elements = [
        text((_MARGIN, 30), title, size=17, weight="bold", room=WIDTH - 2 * _MARGIN),
        *_legend({group for panel in panels for group in panel.groups}),
        *_axis(axis, bottom),
        *_panels(panels),
    ]
    return svg(elements, title=title, width=WIDTH, height=bottom + _FOOTER)


def _panels(panels: list[GanttPanel]) -> Iterator[str]:
    top = float(_HEADER)
    for panel in panels:
        # Smoothed edges of neighbours would look like gaps.
        yield f'<g transform="translate(0 {top:g})" shape-rendering="crispEdges">'
        yield from panel.elements()
        yield "</g>"
        top += panel.height + _GAP


def _legend(groups: set[Group]) -> Iterator[str]:
    x = float(_MARGIN)
    for group in GROUPS:
        if group in groups:
            yield rectangle((x, 44), 14, 12, fill=group.fill)
            yield text((x + 20, 54), group.name)
            x += 20 + text_width(group.name) + 14
    yield text((_LEFT + _PLOT + 46, 54), "busy", fill=PALE, anchor="end")


def _axis(axis: TimeAxis, bottom: float) -> Iterator[str]:
    for tick_s in axis.ticks_s:
        x = axis.x(tick_s)
        yield line((x, _HEADER + 16), (x, bottom), _GRID)
        yield line((x, bottom), (x, bottom + 4), PALE)
        yield text((x, bottom + 17), axis.label(tick_s), anchor="middle", size=11)
    yield line((axis.left, bottom), (axis.left + axis.width, bottom), PALE)
    middle = axis.left + axis.width / 2
    yield text((middle, bottom + 36), f"{axis.unit} from the left edge", fill=PALE, anchor="middle")
