"""One timeline of a Gantt picture: a row for each lane."""

from collections.abc import Iterator
from dataclasses import dataclass

from moebatch.report.gantt_bars import Bar, Group, bars, group_of
from moebatch.report.gantt_window import Window, layer_starts, starts_within
from moebatch.report.svg import INK, fitted, line, rectangle, text, text_width
from moebatch.report.task_words import seconds_text, task_label
from moebatch.report.time_axis import TimeAxis
from moebatch.schedule.task import Task
from moebatch.schedule.timeline.statistics import in_order
from moebatch.schedule.timeline.timeline import Span, Timeline

PALE, FRAME = "#555555", "#d8d8d8"
_HEADING, _BORDERS, _ROW, _BAR = 16, 20, 24, 18
_LABEL, _SMALL = 9.0, 10.0
"""Sizes of letters."""
_LAYER_ROOM = 56.0
"""Between marks of layers."""
_FAINTEST = 0.4
"""Opacity of bars in which the lane was hardly busy."""
_MOST_NOTES = 1500
"""Bars of a lane that say what they are when pointed at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GanttPanel:
    """A part of a timeline on an axis that it may share with others."""

    name: str
    timeline: Timeline
    window: Window
    axis: TimeAxis

    @property
    def lanes(self) -> list[str]:
        """Rows, from the top down."""
        return in_order(self.timeline.lanes)

    @property
    def rows_top(self) -> float:
        """Where the first row begins."""
        return _HEADING + _BORDERS

    @property
    def height(self) -> float:
        """Of all that is drawn."""
        return self.rows_top + _ROW * len(self.lanes)

    @property
    def groups(self) -> set[Group]:
        """What is seen in the window."""
        return {group_of(span.task) for span in self._visible}

    def elements(self) -> Iterator[str]:
        """SVG elements, those on top last, from 0 down."""
        yield from self._heading()
        shares = {lane: self._share(lane) for lane in self.lanes}
        tops = {lane: self._top(number) for number, lane in enumerate(self.lanes)}
        for lane, top in tops.items():
            width = self.axis.x(self.window.length_s) - self.axis.left
            yield rectangle((self.axis.left, top), width, _BAR, fill="#ffffff", stroke=FRAME)
            busiest = shares[lane] == max(shares.values()) > 0
            yield from self._margins(lane, top, shares[lane], "bold" if busiest else "normal")
        yield from self._borders()
        visible = self._visible
        for lane, top in tops.items():
            yield from self._row([span for span in visible if span.lane == lane], top)

    def _top(self, number: int) -> float:
        return self.rows_top + _ROW * number + (_ROW - _BAR) / 2

    @property
    def _visible(self) -> list[Span]:
        return self.timeline.between(self.window.start_s, self.window.end_s)

    def _share(self, lane: str) -> float:
        window = self.window
        busy_s = self.timeline.busy_s(lane, since_s=window.start_s, until_s=window.end_s)
        return busy_s / window.length_s if window.length_s else 0.0

    def _heading(self) -> Iterator[str]:
        name = fitted(self.name, 13, self.axis.width / 2)
        yield text((self.axis.left, 12), name, size=13, weight="bold")
        shift = text_width(name, 13, bold=True) + 14
        length = f"{seconds_text(self.window.length_s)} shown"
        per_pass = f"{seconds_text(self.timeline.steady_pass_s)} per pass"
        words = ", ".join(part for part in (self.window.title, length, per_pass) if part)
        room = self.axis.width - shift
        yield text((self.axis.left + shift, 12), words, fill=PALE, room=room)

    # --- rows -----------------------------------------------------------------------------------

    def _margins(self, lane: str, top: float, share: float, weight: str) -> Iterator[str]:
        """Name of a lane on the left, and its busy share on the right."""
        left, right = self.axis.left - 10, self.axis.left + self.axis.width + 46
        yield text((left, top + 13), lane, anchor="end", weight=weight, room=left)
        yield text((right, top + 13), f"{share:.0%}", anchor="end", weight=weight)

    def _row(self, spans: list[Span], top: float) -> Iterator[str]:
        drawn = bars(spans, self.window, self.axis)
        for bar in drawn:
            yield self._bar(bar, top, noted=len(drawn) <= _MOST_NOTES)
            yield self._label(bar, top)

    def _bar(self, bar: Bar, top: float, *, noted: bool) -> str:
        # Both ends are rounded as the drawing does it, so that neighbours meet.
        left, right = round(bar.left, 1), round(bar.right, 1)
        return rectangle(
            (left, top),
            right - left,
            _BAR,
            fill=bar.fill,
            opacity=max(_FAINTEST, bar.busy),
            kind="task",
            note=self._note(bar.span) if noted and bar.span else "",
        )

    def _note(self, span: Span) -> str:
        note = f"{task_label(span.task, self.timeline.num_layers)}: {seconds_text(span.seconds)}"
        note += f" from {seconds_text(span.start_s)}"
        return note + (f", waited for {span.waited_for}" if span.waited_for else "")

    def _label(self, bar: Bar, top: float) -> str:
        if bar.span is None:
            return ""
        at = ((bar.left + bar.right) / 2, top + 12.5)
        for label in _labels(bar.span.task, self.timeline.num_layers):
            if text_width(label, _LABEL) + 3 <= bar.width:
                return text(at, label, size=_LABEL, fill=bar.group.ink, anchor="middle")
        return ""

    # --- borders --------------------------------------------------------------------------------

    def _borders(self) -> Iterator[str]:
        """Where layers and passes begin, with the number of the layer where there is room."""
        bottom = self.height - (_ROW - _BAR) / 2
        starts = starts_within(layer_starts(self.timeline), self.window)
        room, free = self.axis.x(self.window.length_s) - self.axis.left, 0.0
        every = _every(len(starts), room / _LAYER_ROOM)
        for start in starts:
            layer = start.step % self.timeline.num_layers
            x = self.axis.x(start.start_s - self.window.start_s)
            if layer % every or x < free:
                continue
            label = f"layer {layer}"
            free = x + text_width(label, _SMALL) + 6
            yield line((x, _HEADING + 6), (x, bottom), INK, width=0.8, dash="2 2", kind="layer")
            if free - 6 <= self.axis.left + self.axis.width:
                yield text((x + 3, _HEADING + 15), label, size=_SMALL, fill=PALE)
        for end_s in self.timeline.pass_ends_s:
            if self.window.start_s < end_s <= self.window.end_s:
                x = self.axis.x(end_s - self.window.start_s)
                yield line((x, _HEADING + 6), (x, bottom), INK, width=1.4, kind="pass")


def _labels(task: Task, num_layers: int) -> Iterator[str]:
    """What may stand in a bar, longest first."""
    yield task_label(task, num_layers)
    signs = ("k", task.micro_batch), ("e", task.expert), ("p", task.page)
    short = " ".join(f"{sign}{number}" for sign, number in signs if number is not None)
    yield f"L{task.step % num_layers} {short}".rstrip()
    yield short


def _every(count: int, most: float) -> int:
    """Which layers are marked, so that there are no more than `most`: each, or every 2, 4, 8..."""
    every = 1
    while count > most * every and every < count:
        every *= 2
    return every
