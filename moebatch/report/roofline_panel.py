"""What one panel of a roofline picture shows: a pair of levels, its roofs, and operations on it."""

from collections.abc import Iterator
from dataclasses import dataclass

from moebatch.plan.roofline import Operation, Roof, Roofline
from moebatch.report.log_axes import LogAxes
from moebatch.report.svg import INK, Point, circle, polygon
from moebatch.spec.hardware import LevelName
from moebatch.units import format_flops, format_rate

COLOURS: dict[LevelName, str] = {"vram": "#0072b2", "dram": "#d55e00", "disk": "#555555"}
LINK_COLOUR = "#00805e"
"""All told apart by people who see few colours, too."""
CEILING_DASH = "2 3"
RADIUS = 5.5
"""Of a symbol."""
NAMES: dict[LevelName, str] = {"vram": "VRAM", "dram": "DRAM", "disk": "disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """An operation, and the level where the policy computes it."""

    operation: Operation
    level: LevelName


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of levels, with the operations to be shown on it."""

    roofline: Roofline
    marks: tuple[Mark, ...] = ()

    def __post_init__(self) -> None:
        levels = (self.roofline.level_i, self.roofline.level_j)
        for mark in self.marks:
            assert mark.level in levels, f"{mark.operation.name} is on neither level of the panel"

    def place(self, mark: Mark, level: LevelName) -> tuple[float, float] | None:
        """(I, FLOP/s) of an operation on a level; None if it cannot be computed there."""
        roofline, operation = self.roofline, mark.operation
        on_i = level == roofline.level_i
        if not operation.bytes_j:
            intensity = operation.intensity_i
            return (intensity, roofline.local_i(intensity)) if on_i else None
        if not on_i and not roofline.peak_j:
            return None
        intensity = operation.intensity_j
        if on_i:
            return intensity, roofline.attainable_i(operation.intensity_i, intensity)
        return intensity, roofline.attainable_j(intensity)

    def other(self, mark: Mark) -> tuple[float, float] | None:
        """(I, FLOP/s) on the level that the policy has not chosen; None if there is no choice."""
        i, j = self.roofline.level_i, self.roofline.level_j
        return self.place(mark, j if mark.level == i else i)

    @property
    def moving(self) -> tuple[Mark, ...]:
        """Operations whose data is moved up: those that have a turning point P2."""
        level = self.roofline.level_i
        return tuple(mark for mark in self.marks if mark.level == level and mark.operation.bytes_j)

    def p2(self, mark: Mark) -> float:
        """P2 of an operation, FLOP per byte."""
        return self.roofline.p2(mark.operation.intensity_i)

    def place_text(self, mark: Mark) -> str:
        """``4.0 FLOP/byte, 326 GFLOP/s``: where an operation lies as the policy computes it."""
        place = self.place(mark, mark.level)
        assert place is not None, f"{mark.operation.name} cannot be computed on {mark.level}"
        return f"{number_text(place[0])} FLOP/byte, {format_flops(place[1])}"

    def bound(self, mark: Mark) -> Roof:
        """What binds an operation where the policy computes it."""
        operation = mark.operation
        if mark.level == self.roofline.level_i:
            return self.roofline.bound_i(operation.intensity_i, operation.intensity_j)
        return self.roofline.bound_j(operation.intensity_j)

    @property
    def turning_points(self) -> Iterator[tuple[str, float]]:
        """Names and FLOP per byte of P1, if there is one, and of P2 of each operation that is
        moved; with a name only where there is more than one."""
        if self.roofline.p1:
            yield "P1", self.roofline.p1
        for mark in self.moving:
            yield f"P2 {mark.operation.name}" if len(self.moving) > 1 else "P2", self.p2(mark)

    @property
    def ceilings(self) -> Iterator[tuple[float, float]]:
        """P2, and FLOP/s that the upper level allows from there on, of operations that its memory
        binds, not its arithmetic."""
        for mark in self.moving:
            flops = self.roofline.local_i(mark.operation.intensity_i)
            if flops < self.roofline.peak_i:
                yield self.p2(mark), flops

    @property
    def roofs(self) -> list["RoofLine"]:
        """The roofs to be drawn: none for a level where nothing computes."""
        roofline = self.roofline
        upper = RoofLine(
            name=NAMES[roofline.level_i],
            colour=COLOURS[roofline.level_i],
            bandwidth=roofline.bandwidth_i,
            peak=roofline.peak_i,
        )
        lower = RoofLine(
            name=NAMES[roofline.level_j],
            colour=COLOURS[roofline.level_j],
            bandwidth=roofline.bandwidth_j,
            peak=roofline.peak_j,
        )
        link = RoofLine(
            name=f"{lower.name} to {upper.name}",
            colour=LINK_COLOUR,
            bandwidth=roofline.cross_bandwidth,
            peak=roofline.peak_i,
            is_link=True,
        )
        return [upper, lower, link] if lower.peak else [upper, link]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoofLine:
    """A memory roof up to the ridge, then a compute roof."""

    name: str
    colour: str
    bandwidth: float
    peak: float
    is_link: bool = False
    """The roof of a link ends below the compute roof, which is its upper level's."""

    @property
    def figures(self) -> str:
        """Its bandwidth and peak."""
        rate = format_rate(self.bandwidth)
        return rate if self.is_link else f"{rate}, {format_flops(self.peak)}"

    def slanted(self, axes: LogAxes) -> tuple[Point, Point] | None:
        """Ends of the memory roof within the axes, None if there is none."""
        (left, right), (bottom, top) = axes.across.ends, axes.up.ends
        start = max(left, bottom / self.bandwidth)
        end = min(right, min(self.peak, top) / self.bandwidth)
        if start >= end:
            return None
        return axes.point(start, self.bandwidth * start), axes.point(end, self.bandwidth * end)

    def flat(self, axes: LogAxes) -> tuple[Point, Point] | None:
        """Ends of the compute roof within the axes, None if there is none."""
        left, right = axes.across.ends
        start = max(left, self.peak / self.bandwidth)
        if self.is_link or start >= right:
            return None
        return axes.point(start, self.peak), axes.point(right, self.peak)

    def corners(self, axes: LogAxes) -> list[Point]:
        """Both as one line."""
        slanted, flat = self.slanted(axes), self.flat(axes)
        points = [*(slanted or ()), *(flat or ())]
        return points[:2] + points[3:] if slanted and flat else points


def symbol(index: int, at: Point, *, hollow: bool = False, note: str = "") -> str:
    """The sign of the operation of that number: circle, diamond, square, triangle."""
    fill, kind = ("#ffffff", "alternative") if hollow else (INK, "mark")
    x, y, r = *at, RADIUS
    if index % 4 == 0:
        return circle(at, r, fill=fill, stroke=INK, kind=kind, note=note)
    corners = {
        1: ((x, y - 1.3 * r), (x + 1.3 * r, y), (x, y + 1.3 * r), (x - 1.3 * r, y)),
        2: ((x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)),
        3: ((x, y - 1.2 * r), (x + 1.2 * r, y + r), (x - 1.2 * r, y + r)),
    }[index % 4]
    return polygon(corners, fill=fill, stroke=INK, kind=kind, note=note)


def number_text(number: float) -> str:
    """``0.25``, ``4.0``, ``81.3``, ``599``, ``12 k``: what fits beside a line."""
    if number >= 10_000:
        return f"{number / 1000:,.0f} k"
    return f"{number:.3g}" if number < 1 else f"{number:.1f}" if number < 100 else f"{number:.0f}"
