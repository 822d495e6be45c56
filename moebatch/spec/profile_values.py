"""Single figures of a hardware profile: what may stand there, and which one is meant."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from moebatch.quoting import shown
from moebatch.spec.hardware import Basis, RateCurve
from moebatch.units import parse_bytes, parse_duration, parse_flops, parse_rate

BASES: tuple[Basis, ...] = ("peak", "achieved", "paper")
"""In the order in which a profile lists them."""
WHAT_IF = "--what-if"
_FALLBACKS: dict[Basis, tuple[Basis, ...]] = {
    "achieved": ("achieved", "peak", "paper"),
    "peak": ("peak", "achieved", "paper"),
    "paper": ("paper", "peak", "achieved"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A kind of figure, and the range in which a figure of that kind is believed."""

    noun: str
    """Such as ``a rate``, for messages."""
    example: str
    parse: Callable[[Any], float]
    units: tuple[str, ...]
    """Units in which figures are written, those that are tried first at the front."""
    least: float
    most: float
    """Both belong to the range."""
    most_of_peak: float | None = None
    """Times the peak that an achieved figure may reach: clocks above the nominal one are real, a
    wrong unit is likelier beyond."""

    def read(self, value: object) -> float:
        """The figure of a value as YAML gave it; ValueError says what is allowed."""
        try:
            number = self.parse(value)
        except (ValueError, OverflowError):
            raise self._refusal(value) from None
        if not self.holds(number):
            raise self._refusal(value)
        return float(number)

    def holds(self, number: float) -> bool:
        """Whether a profile may say this; if so, what `write` makes of it is in the range too."""
        return self.least <= number <= self.most

    def write(self, number: float) -> str:
        """``12.9GB/s``: four significant figures, in the unit that keeps the number exactly if
        there is one."""
        texts = [f"{_four_figures(number / scale)}{unit}" for unit, scale in self._scales(number)]
        return next((text for text in texts if self.parse(text) == number), texts[0])

    def _scales(self, number: float) -> list[tuple[str, float]]:
        scales = [(unit, self.parse(f"1{unit}")) for unit in self.units]
        return [(unit, scale) for unit, scale in scales if number >= scale] or scales[-1:]

    @property
    def reach(self) -> str:
        """``from 1ns to 60s``."""
        return f"from {self.write(self.least)} to {self.write(self.most)}"

    def _refusal(self, value: object) -> ValueError:
        return ValueError(
            f"must be {self.noun} such as {self.example}, {self.reach} "
            f"(units: {', '.join(reversed(self.units))}), got {shown(value)}"
        )


def _four_figures(number: float) -> str:
    return format(Decimal(f"{number:.3e}").normalize(), "f")


def _size(example: str, most: float) -> Quantity:
    return Quantity(
        noun="a size",
        example=example,
        parse=parse_bytes,
        units=("TB", "TiB", "GB", "GiB", "MB", "MiB", "KiB", "B"),
        least=2.0**20,
        most=most,
        most_of_peak=1.1,
    )


def _rate(least: float, most: float) -> Quantity:
    return Quantity(
        noun="a rate",
        example="12.9GB/s",
        parse=parse_rate,
        units=("TB/s", "TiB/s", "GB/s", "GiB/s", "MB/s", "MiB/s", "KiB/s", "B/s"),
        least=least,
        most=most,
        most_of_peak=1.5,
    )


# For people who forget or mistake a unit. Whatever a machine can measure of itself lies within,
# were it a rack, or a single board with so much other work that a product of two small matrices
# takes seconds. Bounds are figures of few digits, so that rounding never leads out.
VRAM_SIZE = _size("15GiB", 1e14)
DRAM_SIZE = _size("180GiB", 1e15)
DISK_SIZE = _size("1TB", 1e18)
MEMORY_RATE = _rate(1e3, 1e17)
LINK_RATE = _rate(1e3, 1e14)
SPEED = Quantity(
    noun="a speed",
    example="65TFLOP/s",
    parse=parse_flops,
    units=("TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"),
    least=1e3,
    most=1e18,
    most_of_peak=1.5,
)
DURATION = Quantity(
    noun="a duration",
    example="45us",
    parse=parse_duration,
    units=("s", "ms", "us", "ns"),
    least=1e-9,
    most=60.0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One property of a machine, by data sheet, by measurement and by MoE-Lightning's paper."""

    peak: float | None = None
    achieved: float | None = None
    paper: float | None = None
    source: str
    """Where the figure comes from."""

    def __post_init__(self) -> None:
        assert any(self.has(basis) for basis in BASES), "a figure has a value"

    def numbers(self) -> Iterator[tuple[str, float]]:
        """All that are there, by their keys in the profile."""
        yield from ((basis, getattr(self, basis)) for basis in BASES if self.has(basis))

    def on(self, basis: Basis) -> float:
        """The figure of that basis, or the nearest there is."""
        value: float = _nearest(self, basis)
        return value

    def has(self, basis: Basis) -> bool:
        """Whether the figure of that basis is there itself."""
        return getattr(self, basis) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveFigure:
    """Speed of matrix products of one data type, FLOP/s; where measured, by the number of rows."""

    peak: float | None = None
    achieved: RateCurve | None = None
    paper: float | None = None
    source: str
    """Where the figure comes from."""

    def __post_init__(self) -> None:
        assert any(self.has(basis) for basis in BASES), "a figure has a value"

    def numbers(self) -> Iterator[tuple[str, float]]:
        """All that are there, by their keys in the profile."""
        speeds = (("peak", self.peak), ("paper", self.paper))
        yield from ((key, speed) for key, speed in speeds if speed is not None)
        points = () if self.achieved is None else self.achieved.points
        yield from ((f"achieved.{rows}", speed) for rows, speed in points)

    def on(self, basis: Basis) -> RateCurve:
        """The curve of that basis, or the nearest there is; without a table the same speed for
        every number of rows."""
        value: RateCurve | float = _nearest(self, basis)
        return value if isinstance(value, RateCurve) else level_curve(value)

    def has(self, basis: Basis) -> bool:
        """Whether the figure of that basis is there itself."""
        return getattr(self, basis) is not None


def level_curve(flop_per_s: float) -> RateCurve:
    """The same speed for every number of rows."""
    return RateCurve(points=((1, flop_per_s),))


def supposed(number: float) -> Figure:
    """A figure that somebody wants to know the consequences of, whatever the basis."""
    return Figure(peak=number, achieved=number, paper=number, source=WHAT_IF)


def supposed_speed(figure: CurveFigure | None, flop_per_s: float) -> CurveFigure:
    """A measured curve keeps its form and gets `flop_per_s` as its top."""
    achieved = level_curve(flop_per_s)
    if figure is not None and figure.achieved is not None:
        top = figure.achieved.peak
        points = ((rows, rate / top * flop_per_s) for rows, rate in figure.achieved.points)
        achieved = RateCurve(points=tuple(points))
    return CurveFigure(peak=flop_per_s, achieved=achieved, paper=flop_per_s, source=WHAT_IF)


def _nearest(figure: Figure | CurveFigure, basis: Basis) -> Any:
    return getattr(figure, next(name for name in _FALLBACKS[basis] if figure.has(name)))
