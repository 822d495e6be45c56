"""The Hierarchical Roofline Model as a picture, in the manner of MoE-Lightning's Figures 4 and 5.

Performance is drawn over operational intensity, both logarithmic: the roofs of both levels of
memory, the roof of the link between them, the turning points, and where the operations of a policy
lie. Where a label would lie on something else it is left out: the legend beside the plot has every
figure.
"""

from cmath import phase
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, degrees, floor, isfinite, log10
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter
from matplotlib.transforms import Transform
from numpy.typing import ArrayLike

from moebatch.plan.roofline import Roof
from moebatch.plan.roofs import PlacedOperation
from moebatch.report.pictures.figure import INK, PALE, Picture, Style, fitted, text_width
from moebatch.report.pictures.label_room import LabelRoom, Place, Points_N, along, around, dotted
from moebatch.report.pictures.roofline_panel import (
    COLOURS,
    NAMES,
    Limits,
    Panel,
    Value,
    number_text,
)
from moebatch.units import format_flops

WIDTH = 980
_HEADER, _PANEL, _GAP = 62, 470, 24
_PLOT = (74, 44, 568, 358)
"""Left, top, width and height within a panel."""
_LEGEND_LEFT, _LEGEND_TOP, _LEGEND_WIDTH = 668, 40, 300
_HEADING, _ROW, _NOTE, _INDENT = 12, 24, 15, 34
_AXIS_ROUNDING = 4
"""Ends of an axis are at multiples of a quarter of a power of ten."""
_SYMBOLS = (("o", 11), ("D", 10), ("s", 10.5), ("^", 12.5))
"""Of the operations, with their sizes."""
_TURNING: Style = {"color": PALE, "linewidth": 1, "linestyle": (0, (5, 4))}
_CEILING: Style = {"linewidth": 1.6, "linestyle": (0, (1.25, 1.9))}


def roofline_picture(panels: Sequence[Panel], *, title: str, subtitle: str = "") -> Picture:
    """The picture: a panel for each pair of levels, one below the other.

    Args:
        title: what is shown, such as the model and the machine.
        subtitle: a second line, such as the policy.
    """
    assert panels, "a picture needs a panel"
    heights = [max(_PANEL, ceil(_LEGEND_TOP + _legend_height(panel)) + _GAP) for panel in panels]
    height = _HEADER + sum(heights)
    picture = Picture(title=title, subtitle=subtitle, width=WIDTH, height=height)
    top = _HEADER
    for panel, height in zip(panels, heights, strict=True):
        left, below, *size = _PLOT
        plot = _Plot(picture, panel, picture.axes(left, top + below, *size))
        plot.draw()
        _draw_legend(picture, panel, top + _LEGEND_TOP)
        top += height
    return picture


@dataclass(frozen=True, slots=True)
class _Plot:
    picture: Picture
    panel: Panel
    axes: Axes

    def draw(self) -> None:
        self._draw_axes()
        for name, intensity in self.panel.turning_points.items():
            self.axes.axvline(intensity, **_TURNING, gid=f"turning-point {name}")
        for intensity, flops in self.panel.ceilings:  # of level i at a micro-batch
            colour, right = COLOURS[self.panel.roofline.level_i], self._limits[0][1]
            self.axes.plot([intensity, right], [flops, flops], color=colour, **_CEILING)
        for roof in self.panel.roofs:
            corners = [end for _, ends in roof.pieces(self._limits) for end in ends]
            if corners:
                style: Style = {"color": roof.colour, "linewidth": 2.4, "gid": f"roof {roof.name}"}
                self.axes.plot(*zip(*corners, strict=True), **style, solid_joinstyle="round")
        self._draw_marks()
        self._name_turning_points()
        self._draw_labels()

    @property
    def _limits(self) -> Limits:
        return self.axes.get_xlim(), self.axes.get_ylim()

    def _draw_axes(self) -> None:
        axes, panel = self.axes, self.panel
        roofline, places = panel.roofline, panel.places
        across = [roofline.p1, roofline.ridge_i, roofline.ridge_j, *panel.moving.values()]
        across += [intensity for intensity, _ in places]
        up = [roofline.peak_i, roofline.peak_j, *(flops for _, flops in places)]
        axes.set(xscale="log", yscale="log", facecolor="#fcfcfc")
        axes.set(xlim=_ends(across, margin=3), ylim=_ends(up, margin=2))
        axes.set_xlabel("operational intensity, FLOP/byte", labelpad=8)
        axes.set_ylabel("attainable performance, FLOP/s")
        axes.yaxis.set_label_coords(-52 / _PLOT[2], 0.5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(_power_text))
            axis.set_minor_formatter("")
        axes.tick_params(which="major", length=0, pad=8, labelcolor=PALE)
        axes.tick_params(which="minor", direction="in", length=4, color="#a0a0a0")
        axes.grid(color="#e4e4e4")
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_color(PALE)

    def _draw_marks(self) -> None:
        """Symbols, and hollow ones on the level that the policy has not chosen."""
        for number, mark in enumerate(self.panel.marks):
            place, other = self.panel.place(mark), self.panel.other(mark)
            if other:
                self.axes.plot(*zip(place, other, strict=True), ":", color=PALE, linewidth=1)
                self._draw_symbol(number, other, f"{mark.operation.name}, not chosen", hollow=True)
            note = f"{mark.operation.name}: {_place_text(self.panel, mark)}"
            self._draw_symbol(number, place, note, hollow=False)

    def _draw_symbol(self, number: int, place: Value, note: str, *, hollow: bool) -> None:
        gid = self.picture.note("alternative" if hollow else "mark", [note])
        self.axes.plot(*place, **_symbol(number, hollow=hollow), zorder=4, clip_on=False, gid=gid)

    # --- labels ---------------------------------------------------------------------------------

    def _write(self, place: Place | None, label: str, **style: Any) -> None:
        if place is None:
            return
        at, direction = place
        style |= {"rotation": degrees(phase(direction)), "rotation_mode": "anchor"}
        where = at.real, at.imag
        self.axes.annotate(label, where, xycoords="figure points", annotation_clip=False, **style)

    def _name_turning_points(self) -> None:
        """Names above the plot, in rows where they are close."""
        low, high = _pixels(self.axes.transAxes, [(0, 1), (1, 1)])
        room = LabelRoom(low, high + 100j, np.empty(0, complex), np.empty(0, complex))
        for name, intensity in self.panel.turning_points.items():
            label = f"{name} = {number_text(intensity)}"
            width = text_width(label, bold=True)
            (middle,) = _pixels(self.axes.get_xaxis_transform(), [(intensity, 1)])
            left = min(max(middle.real - width / 2, low.real), high.real - width)
            rows = ((complex(left, middle.imag + 7 + 17 * row), 1 + 0j) for row in range(6))
            self._write(room.take(rows, width), label, weight="bold")

    def _draw_labels(self) -> None:
        low, high = _pixels(self.axes.transAxes, [(0, 0), (1, 1)])
        room = LabelRoom(low, high, self._drawn(faint=False), self._drawn(faint=True))
        for mark in self.panel.marks:
            name = mark.operation.name
            width = text_width(name, bold=True)
            (point,) = _pixels(self.axes.transData, [self.panel.place(mark)])
            self._write(room.take(around(point, width), width), name, weight="bold")
        for roof in self.panel.roofs:
            for label, ends in roof.pieces(self._limits):
                width, is_flat = text_width(label), ends[0][1] == ends[1][1]
                places = along(_pixels(self.axes.transData, ends), width, from_end=is_flat)
                self._write(room.take(places, width), label, color=roof.colour)

    def _drawn(self, *, faint: bool) -> Points_N:
        """Points along roofs and on symbols; or else along dashed and dotted lines."""
        around_9 = np.array([complex(x, y) for x in (-6, 0, 6) for y in (-6, 0, 6)])
        points = [np.empty(0, complex)]
        for line in self.axes.lines:
            line_N = _pixels(line.get_transform(), line.get_xydata())
            if faint == line.is_dashed():
                points.append(dotted(line_N) if len(line_N) > 1 else line_N + around_9)
        return np.concatenate(points)


def _pixels(transform: Transform, values: ArrayLike) -> Points_N:
    pixels_N2 = transform.transform(np.asarray(values, float))
    points_N: Points_N = pixels_N2 @ (1, 1j)
    return points_N


# --- legend ---------------------------------------------------------------------------------------


_Row = tuple[Style, str, Sequence[str]]
"""How something is drawn, what it stands for, and notes below."""


def _draw_legend(picture: Picture, panel: Panel, top: float) -> None:
    height = _legend_height(panel)
    axes = picture.axes(_LEGEND_LEFT, top, _LEGEND_WIDTH, height)
    axes.set(xlim=(0, _LEGEND_WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    upper, lower = NAMES[panel.roofline.level_i], NAMES[panel.roofline.level_j]
    axes.text(0, _HEADING, f"{upper} over {lower}", size=13, weight="bold")
    y, room = float(_HEADING), _LEGEND_WIDTH - _INDENT
    for style, title, notes in _rows(panel):
        y += _ROW
        across = [12] if "marker" in style else [0, 24]
        axes.plot(across, [y - 4] * len(across), **style, clip_on=False)
        axes.text(_INDENT, y, fitted(title, 12, room))
        for note in notes:
            y += _NOTE
            axes.text(_INDENT, y, fitted(note, 11, room), color=PALE, size=11)


def _legend_height(panel: Panel) -> float:
    return _HEADING + sum(_ROW + _NOTE * len(notes) for _, _, notes in _rows(panel))


def _rows(panel: Panel) -> Iterator[_Row]:
    upper, lower = NAMES[panel.roofline.level_i], NAMES[panel.roofline.level_j]
    for roof in panel.roofs:
        yield {"color": roof.colour, "linewidth": 2.4}, f"{roof.name}: {roof.figures}", ()
    for name, intensity in panel.turning_points.items():
        below, above = f"below it, better computed on {lower}", f"from there on {upper} binds"
        note = below if name == "P1" else f"{above}, not the link"
        yield _TURNING, f"{name}: {number_text(intensity)} FLOP/byte", [note]
    if not panel.roofline.p1:
        why = "the link is as fast" if panel.roofline.peak_j else f"{lower} does not compute"
        yield {"alpha": 0}, "P1: none", [f"data always moves: {why}"]
    if panel.ceilings:
        colour = COLOURS[panel.roofline.level_i]
        yield {"color": colour, **_CEILING}, f"dotted: what {upper} allows at mu", ()
    for number, mark in enumerate(panel.marks):
        title = f"{mark.operation.name} on {NAMES[mark.level]}"
        notes = _place_text(panel, mark), f"bound by {_binding(panel, mark)}"
        yield _symbol(number, hollow=False), title, notes
    if any(map(panel.other, panel.marks)):
        yield _symbol(0, hollow=True), "hollow: on the other level", ()


def _binding(panel: Panel, mark: PlacedOperation) -> str:
    names: dict[Roof, str] = {
        "compute": "arithmetic",
        "memory": f"reading {NAMES[mark.level]}",
        "link": f"the link from {NAMES[panel.roofline.level_j]}",
    }
    return names[panel.bound(mark)]


def _place_text(panel: Panel, mark: PlacedOperation) -> str:
    """``4.0 FLOP/byte, 326 GFLOP/s``: where an operation lies as the policy computes it."""
    intensity, flops = panel.place(mark)
    return f"{number_text(intensity)} FLOP/byte, {format_flops(flops)}"


def _symbol(number: int, *, hollow: bool) -> Style:
    """The sign of the operation of that number: circle, diamond, square, triangle."""
    marker, size = _SYMBOLS[number % len(_SYMBOLS)]
    fill = "#ffffff" if hollow else INK
    style = {"markerfacecolor": fill, "markeredgecolor": INK, "markeredgewidth": 1.6}
    return {"marker": marker, "markersize": size, "linestyle": "none", **style}


def _ends(values: Sequence[float], *, margin: float) -> tuple[float, float]:
    """Ends of a logarithmic axis that has the values, of which infinite ones and zeros do not
    count, a factor `margin` to spare at either end, and no fewer than three powers of ten."""
    inside = [value for value in values if value > 0 and isfinite(value)]
    assert inside, "an axis needs a positive number"
    low = floor(log10(min(inside) / margin) * _AXIS_ROUNDING) / _AXIS_ROUNDING
    high = ceil(log10(max(inside) * margin) * _AXIS_ROUNDING) / _AXIS_ROUNDING
    return 10 ** min(low, high - 3), 10**high


def _power_text(value: float, _: int | None) -> str:
    """``0.01``, ``10``, ``100 G``."""
    return f"{value:g}" if value < 1000 else EngFormatter(places=0)(value)
