"""Quantities as people write them: ``12GiB``, ``1.6 GB/s``, ``3h55m``."""

import math
import re

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MAX_BYTES = 2**60
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"12GiB"``, ``"1.5 GB"`` or a plain number of bytes.

    Raises ValueError, with what is allowed, on anything else, on zero and on negative sizes.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"expected a size such as 12GiB, got {text!r}")
    match = _SIZE.fullmatch(str(text))
    unit = match and _SIZE_UNITS.get(match[2].lower())
    if not match or not unit:
        raise ValueError(
            f"expected a size such as 12GiB, 1.5GB or 800MiB (units: B, KB, MB, GB, TB, "
            f"KiB, MiB, GiB, TiB), got {text!r}"
        )
    number = float(match[1]) * unit
    if not 1 <= number < _MAX_BYTES:
        raise ValueError(f"a size must be from 1 byte to {_MAX_BYTES // 2**40} TiB, got {text!r}")
    return round(number)


def format_bytes(num_bytes: float) -> str:
    """``2.41 GiB``: three significant figures in the binary unit that fits."""
    value, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(value) < 1000 or unit == units[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{_three_figures(value)} {unit}"


def format_rate(num_bytes_per_s: float) -> str:
    """``1.62 GB/s``: bandwidths are decimal, as vendors write them."""
    value, units = float(num_bytes_per_s), ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
    for unit in units:
        if abs(value) < 1000 or unit == units[-1]:
            break
        value /= 1000
    return f"{_three_figures(value)} {unit}"


def format_duration(seconds: float) -> str:
    """``3h55m``, ``4m07s``, ``12.3s``: the two units that matter."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds >= 0.95 else f"{seconds * 1e3:.0f}ms"
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def _three_figures(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.{2 if magnitude < 10 else 1 if magnitude < 100 else 0}f}"
