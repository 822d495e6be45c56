"""The plot of a roofline picture: axes, roofs, turning points, operations and their labels."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from moebatch.report.label_room import LabelRoom
from moebatch.report.log_axes import Box, LogAxes, LogRange, steps
from moebatch.report.roofline_panel import (
    CEILING_DASH,
    COLOURS,
    RADIUS,
    Mark,
    Panel,
    RoofLine,
    number_text,
    symbol,
)
from moebatch.report.svg import Point, line, polyline, rectangle, text, text_width
from moebatch.units import format_flops, format_rate

PALE, FAINT, GRID = "#555555", "#a0a0a0", "#e4e4e4"
_PREFIXES = {0: "", 3: " k", 6: " M", 9: " G", 12: " T", 15: " P", 18: " E"}


def panel_axes(panel: Panel, box: Box) -> LogAxes:
    """Axes that show every ridge, turning point and operation."""
    roofline = panel.roofline
    places = [panel.place(mark, mark.level) for mark in panel.marks]
    places += [panel.other(mark) for mark in panel.marks]
    across = [place[0] for place in places if place]
    across += [roofline.p1, roofline.ridge_i, roofline.ridge_j, *map(panel.p2, panel.moving)]
    up = [place[1] for place in places if place] + [roofline.peak_i, roofline.peak_j]
    return LogAxes(
        box=box,
        across=LogRange.around(across, margin=3, least=3),
        up=LogRange.around(up, margin=2, least=3),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflinePlot:
    """One panel on its axes."""

    panel: Panel
    axes: LogAxes

    def elements(self) -> Iterator[str]:
        """SVG elements, those on top last."""
        yield from self._grid()
        yield from self._turning_points()
        yield from self._ceilings()
        for roof in self.panel.roofs:
            yield polyline(roof.corners(self.axes), roof.colour, kind="roof", width=2.4)
        yield from self._alternatives()
        yield from self._labels()
        for k, (mark, point) in enumerate(self._points()):
            yield symbol(k, point, note=f"{mark.operation.name}: {self.panel.place_text(mark)}")

    def _grid(self) -> Iterator[str]:
        box, axes = self.axes.box, self.axes
        yield rectangle((box.left, box.top), box.width, box.height, fill="#fcfcfc", stroke=PALE)
        for power in axes.across.powers:
            x = axes.x(10.0**power)
            if box.left < x < box.right:
                yield line((x, box.top), (x, box.bottom), GRID)
            yield text((x, box.bottom + 18), _power_text(power), anchor="middle", fill=PALE)
        for power in axes.up.powers:
            y = axes.y(10.0**power)
            if box.top < y < box.bottom:
                yield line((box.left, y), (box.right, y), GRID)
            yield text((box.left - 8, y + 4), _power_text(power), anchor="end", fill=PALE)
        for value in axes.across.between:
            yield line((axes.x(value), box.bottom), (axes.x(value), box.bottom - 4), FAINT)
        for value in axes.up.between:
            yield line((box.left, axes.y(value)), (box.left + 4, axes.y(value)), FAINT)
        middle = (box.left + box.right) / 2, (box.top + box.bottom) / 2
        across, up = "operational intensity, FLOP/byte", "attainable performance, FLOP/s"
        yield text((middle[0], box.bottom + 40), across, anchor="middle")
        yield text((22, middle[1]), up, anchor="middle", turn=-90)

    def _turning_points(self) -> Iterator[str]:
        """Dashed lines across the plot, with names above it, in rows where they are close."""
        box, taken = self.axes.box, list[Box]()
        for name, intensity in self.panel.turning_points:
            x = self.axes.x(intensity)
            yield line((x, box.top), (x, box.bottom), PALE, dash="5 4", kind="turning-point")
            label = f"{name} = {number_text(intensity)}"
            width = text_width(label, bold=True) + 6
            left = min(max(x - width / 2, box.left), box.right - width)
            row = Box(left=left, top=box.top - 19, width=width, height=15)
            while any(row.meets(other) for other in taken):
                row = Box(left=left, top=row.top - 15, width=width, height=15)
            taken.append(row)
            yield text((left + width / 2, row.bottom - 3), label, anchor="middle", weight="bold")

    def _ceilings(self) -> Iterator[str]:
        """What level i allows an operation at its micro-batch, right of P2."""
        colour = COLOURS[self.panel.roofline.level_i]
        for start, end in self._ceiling_ends():
            yield line(start, end, colour, dash=CEILING_DASH, width=1.6)

    def _ceiling_ends(self) -> Iterator[tuple[Point, Point]]:
        for intensity, flops in self.panel.ceilings:
            start = self.axes.point(intensity, flops)
            yield start, (self.axes.box.right, start[1])

    def _alternatives(self) -> Iterator[str]:
        """Hollow symbols on the level that the policy has not chosen."""
        for k, (mark, point) in enumerate(self._points()):
            for other in self._other_point(mark):
                yield line(point, other, PALE, dash="1 3")
                yield symbol(k, other, hollow=True, note=f"{mark.operation.name}, not chosen")

    def _other_point(self, mark: Mark) -> tuple[Point, ...]:
        place = self.panel.other(mark)
        return (self.axes.point(*place),) if place else ()

    def _points(self) -> Iterator[tuple[Mark, Point]]:
        for mark in self.panel.marks:
            place = self.panel.place(mark, mark.level)
            assert place is not None, f"{mark.operation.name} cannot be computed on {mark.level}"
            yield mark, self.axes.point(*place)

    # --- labels in the plot ---------------------------------------------------------------------

    def _labels(self) -> Iterator[str]:
        room = LabelRoom(self.axes.box, drawn=self._drawn(), faint=self._faint())
        for mark, point in self._points():
            name = mark.operation.name
            at = room.near(point, text_width(name, bold=True))
            if at:
                yield text(at, name, weight="bold")
        for roof in self.panel.roofs:
            yield from self._slanted_label(roof, room)
            yield from self._flat_label(roof, room)

    def _slanted_label(self, roof: RoofLine, room: LabelRoom) -> Iterator[str]:
        label, ends = f"{roof.name}, {format_rate(roof.bandwidth)}", roof.slanted(self.axes)
        at = ends and room.along(ends, text_width(label))
        if at:
            yield text(at, label, fill=roof.colour, turn=self.axes.angle)

    def _flat_label(self, roof: RoofLine, room: LabelRoom) -> Iterator[str]:
        label, ends = format_flops(roof.peak), roof.flat(self.axes)
        at = ends and room.on(ends, text_width(label))
        if at:
            yield text(at, label, fill=roof.colour)

    def _drawn(self) -> Iterator[Point]:
        """Points along roofs, and on symbols."""
        for roof in self.panel.roofs:
            for start, end in pairwise(roof.corners(self.axes)):
                yield from steps(start, end)
        for mark, point in self._points():
            for x, y in (point, *self._other_point(mark)):
                yield from (
                    (x + a * RADIUS, y + b * RADIUS) for a in (-1, 0, 1) for b in (-1, 0, 1)
                )

    def _faint(self) -> Iterator[Point]:
        """Points along dashed and dotted lines."""
        for _, intensity in self.panel.turning_points:
            x = self.axes.x(intensity)
            yield from steps((x, self.axes.box.top), (x, self.axes.box.bottom))
        for start, end in self._ceiling_ends():
            yield from steps(start, end)
        for mark, point in self._points():
            for other in self._other_point(mark):
                yield from steps(point, other)


def _power_text(power: int) -> str:
    """``0.01``, ``10``, ``100 G``: ten to that power."""
    if power < 0:
        return f"{10.0**power:.{-power}f}"
    thousands = min(power // 3 * 3, max(_PREFIXES))
    return f"{10 ** (power - thousands)}{_PREFIXES[thousands]}"
