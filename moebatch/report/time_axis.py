"""A linear axis of seconds on a drawing."""

from dataclasses import dataclass
from math import floor, log10

_NUM_TICKS = 12
"""At most."""
_UNITS = (("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAxis:
    """Maps seconds, from 0 at its left end, to places on a drawing."""

    left: float
    width: float
    length_s: float

    def __post_init__(self) -> None:
        assert self.length_s > 0, "an axis needs a length"

    def x(self, seconds: float) -> float:
        """Where a moment lies, at most at either end."""
        share = min(1.0, max(0.0, seconds / self.length_s))
        return self.left + self.width * share

    @property
    def tick_s(self) -> float:
        """Seconds between ticks: 1, 2 or 5 times a power of ten."""
        power = 10.0 ** floor(log10(self.length_s / _NUM_TICKS))
        for digit in (1, 2, 5):
            if digit * power * _NUM_TICKS >= self.length_s:
                return digit * power
        return 10 * power

    @property
    def ticks_s(self) -> list[float]:
        """Moments of the ticks, 0 included."""
        return [self.tick_s * k for k in range(floor(self.length_s / self.tick_s * (1 + 1e-9)) + 1)]

    @property
    def unit(self) -> str:
        """``seconds`` or parts of them, whichever gives whole numbers of few digits."""
        return self._unit[0]

    def label(self, seconds: float) -> str:
        """A moment in that unit, without it."""
        return f"{seconds / self._unit[1]:.10g}" if seconds else "0"

    @property
    def _unit(self) -> tuple[str, float]:
        # The slack is for steps such as 5e-3, which rounding makes a little smaller.
        return next((unit for unit in _UNITS if self.tick_s >= unit[1] * (1 - 1e-9)), _UNITS[-1])
