"""A rectangle with logarithmic axes on a drawing, and room for labels in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import atan2, ceil, degrees, floor, hypot, isfinite, log10

from moebatch.report.svg import Point

_ROUNDING = 4
"""Ends of an axis are at multiples of a quarter of a power of ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRange:
    """The range of a logarithmic axis, in powers of ten that need not be whole."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], *, margin: float, least: float) -> "LogRange":
        """A range that holds the values, of which infinite ones and zeros do not count, with at
        least a factor `margin` to spare at either end, and no fewer than `least` powers of ten."""
        inside = [value for value in values if value > 0 and isfinite(value)]
        assert inside, "an axis needs a positive number"
        low = floor(log10(min(inside) / margin) * _ROUNDING) / _ROUNDING
        high = ceil(log10(max(inside) * margin) * _ROUNDING) / _ROUNDING
        return cls(low=min(low, high - least), high=high)

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1 at the high one."""
        return (log10(value) - self.low) / (self.high - self.low)

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value."""
        return 10.0**self.low, 10.0**self.high

    @property
    def powers(self) -> range:
        """Exponents of the whole powers of ten."""
        return range(ceil(self.low), floor(self.high) + 1)

    @property
    def between(self) -> Iterator[float]:
        """Two to nine times a power of ten, as far as within the range."""
        low, high = self.ends
        for power in range(floor(self.low), ceil(self.high)):
            for digit in range(2, 10):
                if low <= digit * 10.0**power <= high:
                    yield digit * 10.0**power


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """An upright rectangle."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its lower edge, the greater number."""
        return self.top + self.height

    @property
    def corners(self) -> tuple[Point, Point]:
        """Upper left and lower right."""
        return (self.left, self.top), (self.right, self.bottom)

    def holds(self, point: Point) -> bool:
        """Whether a point lies in it or on its edge."""
        x, y = point
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def wider(self, margin: float) -> "Box":
        """The box and a margin on its left and right."""
        return replace(self, left=self.left - margin, width=self.width + 2 * margin)

    def meets(self, other: "Box") -> bool:
        """Whether the two have an area in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True, kw_only=True, slots=True)
class LogAxes:
    """Maps pairs of values to points of a rectangle."""

    box: Box
    across: LogRange
    up: LogRange

    def x(self, value: float) -> float:
        """Where a value lies across."""
        return self.box.left + self.box.width * self.across.share(value)

    def y(self, value: float) -> float:
        """Where a value lies, greater ones further up."""
        return self.box.bottom - self.box.height * self.up.share(value)

    def point(self, x: float, y: float) -> Point:
        """Where a pair of values lies."""
        return self.x(x), self.y(y)

    @property
    def slope(self) -> Point:
        """Step on the drawing, of length 1, along a line on which y grows in proportion to x."""
        step = self.box.width / (self.across.high - self.across.low)
        rise = self.box.height / (self.up.high - self.up.low)
        length = hypot(step, rise)
        return step / length, -rise / length

    @property
    def angle(self) -> float:
        """Degrees clockwise by which such a line is turned."""
        across, down = self.slope
        return degrees(atan2(down, across))


def steps(start: Point, end: Point, length: float = 4.0) -> list[Point]:
    """Points along a line, a few units apart, its ends included."""
    across, down = end[0] - start[0], end[1] - start[1]
    count = max(1, ceil(hypot(across, down) / length))
    return [(start[0] + across * k / count, start[1] + down * k / count) for k in range(count + 1)]
