"""How long a run may take, as users and Slurm write it."""

import re

from moebatch.errors import ConfigError, Fault
from moebatch.job.slurm import reserve_s, seconds_left
from moebatch.quoting import shown

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{2})(?::(\d{2}))?")
_SECONDS = (86_400, 3600, 60, 1)


def allowed_s(asked: str | None) -> float | None:
    """Seconds that a run may take: as asked for, and as Slurm leaves it. Raises ConfigError."""
    limits = [] if asked is None else [parse_runtime(asked)]
    left_s = seconds_left()
    if left_s is not None:
        limits.append(max(1.0, left_s - reserve_s(left_s)))
    return min(limits, default=None)


def parse_runtime(text: str) -> float:
    """Seconds of ``3h30m``, ``90m`` or ``45s``, and of ``3:30:00`` or ``1-12:00`` as Slurm has it.

    Raises ConfigError on anything else and on nothing.
    """
    parts = _units(text.strip()) or _clock(text.strip())
    seconds = sum(number * unit for number, unit in zip(parts, _SECONDS, strict=False))
    if seconds <= 0:
        message = f"must be a time such as 3h30m, 45m or 1-12:00:00, got {shown(text)}"
        raise ConfigError([Fault(file="moebatch run", where="--max-runtime", message=message)])
    return float(seconds)


def _units(text: str) -> tuple[int, ...]:
    match = _UNITS.fullmatch(text)
    return tuple(int(part or 0) for part in match.groups()) if match and text else ()


def _clock(text: str) -> tuple[int, ...]:
    """As Slurm reads them: two numbers are minutes and seconds, unless there are days."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        return ()
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        return 0, 0, first, second
    return days, first, second, third
