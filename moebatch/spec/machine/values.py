"""Single figures of a hardware profile: what may stand there, and which one is meant."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Generic, Self, TypeVar

from moebatch.quoting import shown
from moebatch.spec.machine.hardware import Basis, RateCurve
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

    def nearest(self, number: float) -> float:
        """The number, or the end of the range that it lies beyond."""
        return min(max(number, self.least), self.most)

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


# Bounds catch a unit that was forgotten or mistaken. Whatever a machine can measure of itself lies
# within, were it a rack, or a single board with so much other work that a product of two small
# matrices takes seconds. They are figures of few digits, so that rounding never leads out.
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


Achieved = TypeVar("Achieved", float, RateCurve)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures(Generic[Achieved]):
    """One property of a machine, by data sheet, by measurement and by MoE-Lightning's paper."""

    peak: float | None = None
    achieved: Achieved | None = None
    paper: float | None = None
    source: str
    """Where the figure comes from."""

    def __post_init__(self) -> None:
        assert any(self.has(basis) for basis in BASES), "a figure has a value"

    def has(self, basis: Basis) -> bool:
        """Whether the figure of that basis is there itself."""
        return getattr(self, basis) is not None

    def numbers(self) -> Iterator[tuple[str, float]]:
        """All that are there, by their dotted keys in the profile."""
        for basis, value in self._given():
            if isinstance(value, RateCurve):
                yield from ((f"{basis}.{rows}", speed) for rows, speed in value.points)
            else:
                yield basis, value

    def plain(self, quantity: Quantity, source: str) -> dict[str, object]:
        """The keys of the figure in a profile whose figures come from `source` unless they say
        otherwise."""
        content: dict[str, object] = {
            basis: _plain(value, quantity) for basis, value in self._given()
        }
        return content if self.source == source else {**content, "source": self.source}

    def scaled(self, factor: float, source: str) -> Self:
        """As measured, `factor` times as much as it was; whatever the data sheet says."""
        before = self._nearest("achieved")
        after: Any = before.scaled(factor) if isinstance(before, RateCurve) else before * factor
        return replace(self, peak=None, achieved=after, source=source)

    def _given(self) -> Iterator[tuple[Basis, float | RateCurve]]:
        yield from ((basis, getattr(self, basis)) for basis in BASES if self.has(basis))

    def _nearest(self, basis: Basis) -> Any:
        return getattr(self, next(name for name in _FALLBACKS[basis] if self.has(name)))


class Figure(Figures[float]):
    """A property that is one number on each basis."""

    __slots__ = ()

    def on(self, basis: Basis) -> float:
        """The figure of that basis, or the nearest there is."""
        return float(self._nearest(basis))


class CurveFigure(Figures[RateCurve]):
    """A rate of matrix products, their FLOP/s in one data type or bytes per second of weights that
    are decoded for them; where measured, by the number of rows."""

    __slots__ = ()

    def on(self, basis: Basis) -> RateCurve:
        """The curve of that basis, or the nearest there is; without a table the same rate for
        every number of rows."""
        value: RateCurve | float = self._nearest(basis)
        return value if isinstance(value, RateCurve) else level_curve(value)


def level_curve(rate: float) -> RateCurve:
    """The same rate for every number of rows."""
    return RateCurve(points=((1, rate),))


def supposed(number: float) -> Figure:
    """A figure whose consequences a user asks for, whatever the basis."""
    return Figure(peak=number, achieved=number, paper=number, source=WHAT_IF)


def supposed_speed(figure: CurveFigure, flop_per_s: float) -> CurveFigure:
    """A measured curve keeps its form and gets `flop_per_s` as its top."""
    before = figure.achieved or level_curve(flop_per_s)
    achieved = before.scaled(flop_per_s / before.peak)
    return CurveFigure(peak=flop_per_s, achieved=achieved, paper=flop_per_s, source=WHAT_IF)


def _plain(value: float | RateCurve, quantity: Quantity) -> object:
    if not isinstance(value, RateCurve):
        return quantity.write(value)
    if value == level_curve(value.peak):
        return quantity.write(value.peak)
    return {rows: quantity.write(rate) for rows, rate in value.points}
