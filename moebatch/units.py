"""Quantities as people write them: ``12GiB``, ``1.6 GB/s``, ``65 TFLOP/s``, ``3h55m``."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

from moebatch.quoting import shown

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
"""By the prefix of a unit."""
_OF_BYTES = {prefix: _DECIMAL[prefix] for prefix in ("", *"kKMGT")} | _BINARY
_SIZE_UNITS = {"": 1} | {f"{prefix}b".lower(): n for prefix, n in _OF_BYTES.items()}
_MAX_BYTES = 2**60
_LEAST_BARE_BYTES = 10**6
"""A smaller number was meant to have a unit."""
_MOST_MORE_FIGURES = 4
"""Beyond them a size is written in bytes."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")

_RATE_UNITS = {f"{prefix}B/s": n for prefix, n in _OF_BYTES.items()}
"""In these letters only: with a small b they are bits, and eight times as many."""
_FLOPS_UNITS = {f"{prefix}FLOP/s": _DECIMAL[prefix] for prefix in ("", *"MGTP")}
_DURATION_UNITS: Mapping[str, Fraction | int] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": 1,
}
_MAX_RATE = 1e18
_MAX_FLOPS = 1e21
_MAX_SECONDS = 1e9
_MEASURE = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([a-zA-Z/]{1,8})\s*")


class UnitMissing(ValueError):
    """A number of bytes that was hardly meant as one; the message has the likeliest unit."""


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"12GiB"``, ``"1.5 GB"`` or a plain number of bytes.

    Raises ValueError, with what is allowed, on anything else, on zero and on negative sizes, and
    UnitMissing on plain numbers below a million.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"expected a size such as 12GiB, got {shown(text)}")
    match = _SIZE.fullmatch(str(text))
    unit = match and _SIZE_UNITS.get(match[2].lower())
    if not match or not unit:
        raise ValueError(
            f"expected a size such as 12GiB, 1.5GB or 800MiB (units: B, KB, MB, GB, TB, "
            f"KiB, MiB, GiB, TiB), got {shown(text)}"
        )
    number = float(match[1]) * unit
    if not 1 <= number < _MAX_BYTES:
        raise ValueError(
            f"a size must be from 1 byte to {_MAX_BYTES // 2**40} TiB, got {shown(text)}"
        )
    if not match[2] and number < _LEAST_BARE_BYTES:
        guess = "GiB" if number < 2**10 else "MiB"
        is_read = f"{match[1]} has no unit, which makes it {match[1]} bytes"
        raise UnitMissing(f"{is_read}; did you mean {match[1]}{guess}? As bytes: {match[1]}B")
    return round(number)


def parse_rate(text: str) -> float:
    """Bytes per second of ``"12.9 GB/s"`` or ``"16GiB/s"``.

    Raises ValueError, with what is allowed, on anything else: no unit, bits, nothing or less,
    more than 1e18.
    """
    return _measure(text, _RATE_UNITS, _MAX_RATE, "a rate such as 12.9GB/s")


def parse_flops(text: str) -> float:
    """FLOP per second of ``"65 TFLOP/s"``.

    Raises ValueError, with what is allowed, on anything else, on nothing or less and above 1e21.
    """
    return _measure(text, _FLOPS_UNITS, _MAX_FLOPS, "a speed such as 65TFLOP/s")


def parse_duration(text: str) -> float:
    """Seconds of ``"45us"``, ``"1.2 ms"`` or ``"3s"``.

    Raises ValueError, with what is allowed, on anything else, on nothing or less and above 1e9.
    """
    return _measure(text, _DURATION_UNITS, _MAX_SECONDS, "a duration such as 45us")


def _measure(
    text: object, units: Mapping[str, Fraction | int], most: float, expected: str
) -> float:
    match = _MEASURE.fullmatch(text) if isinstance(text, str) else None
    unit = units.get(match[2]) if match else None
    if not match or not unit:
        raise ValueError(f"expected {expected} (units: {', '.join(units)}), got {shown(text)}")
    # Fractions, so that 0.8TFLOP/s is the same number as 0.8e12.
    number = float(Fraction(match[1]) * unit)
    if not 0 < number <= most:
        raise ValueError(f"expected {expected}, above 0 and at most {most:g}, got {shown(text)}")
    return number


def format_number(value: float, *, figures: int = 4) -> str:
    """``143,400``, ``258.3``, ``0.0213``: so many significant figures, without an exponent."""
    return format(Decimal(f"{value:.{figures}g}"), ",f") if math.isfinite(value) else "?"


def count_of(number: int, thing: str, things: str | None = None) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def named_layers(layers: Iterable[int]) -> str:
    """``layer 3``, ``layers 0, 2 to 5``: by their numbers, neighbours as one."""
    runs: list[list[int]] = []
    for number in sorted(set(layers)):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(named)}"


def format_bytes(num_bytes: float, *, more_figures: int = 0) -> str:
    """``2.41 GiB``: three significant figures, or more, in the binary unit that fits."""
    value, unit = _in_unit(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    if unit == "B":
        return f"{value:.0f} {unit}"
    return f"{three_figures(value, more=more_figures)} {unit}"


def format_unlike(one_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Two sizes of which a message says that one is more than the other, with so many figures that
    this can be seen: ``2.804 GiB`` and ``2.801 GiB``."""
    for more_figures in range(_MOST_MORE_FIGURES):
        one, other = (format_bytes(n, more_figures=more_figures) for n in (one_bytes, other_bytes))
        if one != other:
            return one, other
    return f"{one_bytes} B", f"{other_bytes} B"


def format_rate(num_bytes_per_s: float) -> str:
    """``1.62 GB/s``: bandwidths are decimal, as vendors write them."""
    value, unit = _in_unit(num_bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))
    return f"{three_figures(value)} {unit}"


def format_flops(num_flop_per_s: float) -> str:
    """``2.30 TFLOP/s``."""
    units = "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"
    value, unit = _in_unit(num_flop_per_s / 1e6, 1000, units)
    return f"{three_figures(value)} {unit}"


def _in_unit(value: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    """In the first unit, each `step` of the one before, in which three digits write it."""
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return value, unit
        value /= step
    return value, units[-1]


def format_duration(seconds: float) -> str:
    """``3h55m``, ``4m07s``, ``12.3s``, ``0.4ms``, ``40us``: the two units that matter."""
    if not math.isfinite(seconds):
        return "?"
    if 0 < seconds < 95e-6:
        return f"{seconds * 1e6:.0f}us"
    if 0 < seconds < 0.00995:
        return f"{seconds * 1e3:.1f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s" if seconds >= 0.95 else f"{seconds * 1e3:.0f}ms"
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def three_figures(value: float, *, more: int = 0) -> str:
    """``2.41``, ``24.1``, ``241``, or with more figures: how many stand behind the point, a number
    shows when it has been rounded, so that 9.996 is ``10.0``."""
    magnitude = abs(float(f"{value:.{3 + more}g}"))
    return f"{value:.{more + (2 if magnitude < 10 else 1 if magnitude < 100 else 0)}f}"
