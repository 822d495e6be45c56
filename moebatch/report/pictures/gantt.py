"""Timelines as a Gantt picture: a row for each lane, bubbles white, one axis of time for all.

Timelines are drawn below each other from the same left edge, so that of two schedules for the same
layers the shorter one is the faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from moebatch.report.pictures.figure import (
    BARS,
    FRAME,
    INK,
    MARGIN,
    PALE,
    Picture,
    fitted,
    text_width,
)
from moebatch.report.pictures.gantt_bars import (
    GROUPS,
    Bar,
    Group,
    Window,
    bars,
    group_of,
    layer_starts,
    shown_window,
)
from moebatch.report.task_names import seconds_text, task_label
from moebatch.schedule.task import Task
from moebatch.schedule.timeline.statistics import in_order
from moebatch.schedule.timeline.timeline import Span, Timeline

WIDTH = 1120
_LEFT, _PLOT = 118, 930
_BUSY = _PLOT + 46
"""Right end of the shares, from the left end of the rows."""
_HEADER, _GAP, _FOOTER = 72, 18, 46
_HEADING, _BORDERS, _ROW, _BAR = 16, 20, 24, 18
_LABEL, _SMALL = 9.0, 10.0
"""Sizes of letters."""
_LAYER_ROOM = 56.0
"""Between marks of layers."""
_FAINTEST = 0.4
"""Opacity of bars in which the lane was hardly busy."""
_SHADE = 0.86
_MOST_NOTES = 1500
"""Bars of a lane up to which each has a note for a viewer of SVG."""
_NUM_TICKS = 12
"""At most."""
_UNITS = (("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))


def gantt_picture(
    timelines: Mapping[str, Timeline],
    *,
    since_s: float | None = None,
    until_s: float | None = None,
    title: str,
) -> Picture:
    """The picture of one or several timelines by name.

    Args:
        since_s: first moment to be shown, in seconds of each timeline; without either end the last
            pass is shown, or a few layers in its middle if it has many.
        until_s: last moment to be shown.
        title: what is shown, such as the model and the machine.
    """
    assert timelines, "a picture needs a timeline"
    shown = {name: shown_window(one, since_s, until_s) for name, one in timelines.items()}
    length_s = max(window.length_s for window in shown.values())
    assert length_s > 0, "nothing lies between the two moments"
    height = sum(_height(timeline) + _GAP for timeline in timelines.values())
    picture = Picture(title=title, width=WIDTH, height=_HEADER + height + _FOOTER)
    axes = picture.axes(_LEFT, _HEADER, _PLOT, height)
    axes.set(xlim=(0, _PLOT), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(_BUSY, 54 - _HEADER, "busy", color=PALE, ha="right")
    _draw_time(picture.axes(_LEFT, _HEADER + _HEADING, _PLOT, height - _HEADING), length_s)
    top, groups = 0.0, set[Group]()
    for name, timeline in timelines.items():
        panel = _Panel(picture, axes, timeline, shown[name], top, _PLOT / length_s)
        panel.draw(name)
        groups |= {group_of(span.task) for span in panel.visible}
        top += _height(timeline) + _GAP
    _draw_legend(picture, groups)
    return picture


def _height(timeline: Timeline) -> float:
    return _HEADING + _BORDERS + _ROW * len(timeline.lanes)


def time_axis(length_s: float) -> tuple[float, str, float]:
    """Seconds between ticks, and the unit of their labels with its seconds: whichever gives whole
    numbers of few digits."""
    ticks_s = MaxNLocator(nbins=_NUM_TICKS, steps=[1, 2, 5, 10]).tick_values(0, length_s)
    tick_s = float(ticks_s[1] - ticks_s[0])
    # The slack is for steps such as 5e-3, which rounding makes a little smaller.
    unit, size_s = next((unit for unit in _UNITS if tick_s >= unit[1] * (1 - 1e-9)), _UNITS[-1])
    return tick_s, unit, size_s


def _draw_time(axes: Axes, length_s: float) -> None:
    """The axis of time below all panels, and its grid behind them."""
    tick_s, unit, size_s = time_axis(length_s)
    axes.set(xlim=(0, length_s / size_s), yticks=[], facecolor="none", zorder=-1)
    axes.xaxis.set_major_locator(MultipleLocator(tick_s / size_s))
    axes.xaxis.set_major_formatter("{x:.10g}")
    axes.tick_params(axis="x", color=PALE, length=4, pad=4, labelsize=11)
    axes.set_xlabel(f"{unit} from the left edge", color=PALE, labelpad=7)
    axes.grid(axis="x", color="#ececec")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)


def _draw_legend(picture: Picture, groups: set[Group]) -> None:
    handles = [Patch(color=group.fill, label=group.name) for group in GROUPS if group in groups]
    corner = (MARGIN - 2) / picture.width, 1 - 43 / picture.height
    picture.figure.legend(
        handles=handles,
        ncols=len(GROUPS),
        loc="upper left",
        bbox_to_anchor=corner,
        frameon=False,
        borderpad=0.2,
        borderaxespad=0,
        handlelength=14 / 12,
        handletextpad=0.5,
        columnspacing=1.2,
    )


@dataclass(frozen=True)
class _Panel:
    """A part of a timeline on axes in pixels, which it shares with others."""

    picture: Picture
    axes: Axes
    timeline: Timeline
    window: Window
    top: float
    pixels_per_s: float

    @cached_property
    def visible(self) -> list[Span]:
        """What is seen in the window, in order of time."""
        spans = self.timeline.between(self.window.start_s, self.window.end_s)
        return sorted(spans, key=lambda span: (span.start_s, span.end_s))

    def draw(self, name: str) -> None:
        """Its heading, a row for each lane, and where layers and passes begin."""
        self._draw_heading(name)
        lanes = in_order(self.timeline.lanes)
        shares = {lane: self._share(lane) for lane in lanes}
        for number, lane in enumerate(lanes):
            top = self.top + _HEADING + _BORDERS + _ROW * number + (_ROW - _BAR) / 2
            busiest = shares[lane] == max(shares.values()) > 0
            self._draw_lane(lane, top, shares[lane], "bold" if busiest else "normal")
            self._draw_bars([span for span in self.visible if span.lane == lane], top)
        self._draw_layers()
        for end_s in self.timeline.pass_ends_s:
            if self.window.start_s < end_s <= self.window.end_s:
                self._draw_border(self._x(end_s), linewidth=1.4)

    def _x(self, moment_s: float) -> float:
        return (moment_s - self.window.start_s) * self.pixels_per_s

    def _share(self, lane: str) -> float:
        window = self.window
        busy_s = self.timeline.busy_s(lane, since_s=window.start_s, until_s=window.end_s)
        return busy_s / window.length_s if window.length_s else 0.0

    def _draw_heading(self, name: str) -> None:
        shown = fitted(name, 13, _PLOT / 2, bold=True)
        self.axes.text(0, self.top + 12, shown, size=13, weight="bold")
        shift = text_width(shown, 13, bold=True) + 14
        length = f"{seconds_text(self.window.length_s)} shown"
        per_pass = f"{seconds_text(self.timeline.steady_pass_s)} per pass"
        facts = ", ".join(part for part in (self.window.title, length, per_pass) if part)
        self.axes.text(shift, self.top + 12, fitted(facts, 12, _PLOT - shift), color=PALE)

    # --- rows -----------------------------------------------------------------------------------

    def _draw_lane(self, lane: str, top: float, share: float, weight: str) -> None:
        """A white row, the name of its lane on the left, and its busy share on the right."""
        width = self._x(self.window.end_s)
        row = PolyCollection([_corners(0, width, top)], facecolor="white", edgecolor=FRAME)
        row.set(linewidth=1, clip_on=False, zorder=1, gid=self.picture.note(BARS, ()))
        self.axes.add_collection(row)
        shown = fitted(lane, 12, _LEFT - 10, bold=True)
        self.axes.text(-10, top + 13, shown, ha="right", weight=weight)
        self.axes.text(_BUSY, top + 13, f"{share:.0%}", ha="right", weight=weight)

    def _draw_bars(self, spans: Sequence[Span], top: float) -> None:
        drawn = bars(spans, self.window, self.pixels_per_s)
        noted = len(drawn) <= _MOST_NOTES
        notes = [self._note(bar.span) if noted and bar.span else "" for bar in drawn]
        # Ends are rounded, so that neighbours meet and the file stays small.
        corners = [_corners(round(bar.left, 1), round(bar.right, 1), top) for bar in drawn]
        shapes = PolyCollection(corners, facecolor=[_colour(bar) for bar in drawn], linewidth=0)
        shapes.set(antialiased=False, clip_on=False, zorder=2, gid=self.picture.note(BARS, notes))
        self.axes.add_collection(shapes)
        for bar in drawn:
            self._label(bar, top)

    def _note(self, span: Span) -> str:
        note = f"{task_label(span.task, self.timeline.num_layers)}: {seconds_text(span.seconds)}"
        note += f" from {seconds_text(span.start_s)}"
        return note + (f", waited for {span.waited_for}" if span.waited_for else "")

    def _label(self, bar: Bar, top: float) -> None:
        if bar.span is None:
            return
        for label in _labels(bar.span.task, self.timeline.num_layers):
            if text_width(label, _LABEL) + 2 <= bar.width:
                at = (bar.left + bar.right) / 2, top + 12.5
                self.axes.text(*at, label, size=_LABEL, color=bar.group.ink, ha="center")
                return

    # --- borders --------------------------------------------------------------------------------

    def _draw_layers(self) -> None:
        """Where layers begin, with the number of the layer where there is room."""
        starts = layer_starts(self.timeline, self.window)
        most, every, free = self._x(self.window.end_s) / _LAYER_ROOM, 1, 0.0
        while len(starts) > most * every and every < len(starts):
            every *= 2
        for start_s, step in starts:
            layer, x = step % self.timeline.num_layers, self._x(start_s)
            if layer % every or x < free:
                continue
            label = f"layer {layer}"
            free = x + text_width(label, _SMALL) + 6
            self._draw_border(x, linewidth=0.8, linestyle=(0, (2.5, 2.5)))
            if free - 6 <= _PLOT:
                at = x + 3, self.top + _HEADING + 15
                self.axes.text(*at, label, size=_SMALL, color=PALE)

    def _draw_border(self, x: float, **style: Any) -> None:
        top, bottom = self.top + _HEADING + 6, self.top + _height(self.timeline)
        bottom -= (_ROW - _BAR) / 2
        self.axes.plot([x, x], [top, bottom], color=INK, clip_on=False, zorder=1.5, **style)


def _corners(left: float, right: float, top: float) -> Sequence[tuple[float, float]]:
    bottom = top + _BAR
    return (left, top), (right, top), (right, bottom), (left, bottom)


def _colour(bar: Bar) -> tuple[float, ...]:
    shade = _SHADE if bar.is_shaded else 1.0
    return *(shade * part for part in to_rgb(bar.group.fill)), max(_FAINTEST, bar.busy)


def _labels(task: Task, num_layers: int) -> Iterator[str]:
    """What may stand in a bar, longest first."""
    yield task_label(task, num_layers)
    layer = f"L{task.step % num_layers}"
    experts = tuple(("e", expert) for expert in task.experts)
    signs = ("k", task.micro_batch), *experts, ("p", task.page)
    names = " ".join(f"{sign}{number}" for sign, number in signs if number is not None)
    yield f"{layer} {names}".rstrip()
    if len(experts) > 1:
        yield f"{layer} {len(experts)} experts"
    else:
        yield names
