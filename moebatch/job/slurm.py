"""What a run asks of Slurm, if it is there, and how long it may take."""

import os
import re
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime

from moebatch.errors import ConfigError
from moebatch.quoting import shown

_PATIENCE_S = 10.0
_NOTICE_S = 120.0
_RESERVE_S = 90.0
_SHORT = 0.25
"""Of short jobs, both are so much of their time."""
_UNITS = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)
_SECONDS = (86_400, 3600, 60, 1)
_TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)


def notice_s(limit_s: float) -> float:
    """So long before the end of a job Slurm is asked for a signal: it may be a minute late, and a
    run stops within ten seconds."""
    return min(_NOTICE_S, _SHORT * limit_s)


def reserve_s(limit_s: float) -> float:
    """So long before the end of a job its run stops by itself, should no signal have come."""
    return min(_RESERVE_S, _SHORT * limit_s)


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
    seconds = parse_time_limit(text) if ":" in text else None
    units = _UNITS.fullmatch(text.strip())
    if units:
        seconds = sum(int(part or 0) * s for part, s in zip(units.groups(), _SECONDS, strict=True))
    if not seconds:
        message = f"must be a time such as 3h30m, 45m or 1-12:00:00, got {shown(text)}"
        raise ConfigError.at("moebatch run", message, where="--max-runtime")
    return float(seconds)


def parse_time_limit(text: str) -> float | None:
    """Seconds of a limit as Slurm reads it: minutes, minutes:seconds, hours:minutes:seconds, or
    days-hours with minutes and seconds behind them; None if it is none."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None or third is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    total = (days or 0) * 86_400 + (hours or 0) * 3600 + (minutes or 0) * 60 + (seconds or 0)
    return float(total) or None


def slurm_job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """As commands want it: that of the task, where it is one of an array."""
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


def array_task(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of this task of an array; None outside of one. How many there are says nothing: of
    an array that has been asked for tasks 3 and 7 it is two."""
    number = environment.get("SLURM_ARRAY_TASK_ID", "")
    return int(number) if number.isdecimal() and len(number) < 10 else None


def seconds_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Until this job is over; None outside of Slurm, and where the job has no end."""
    job = slurm_job_id(environment)
    if job is None:
        return None
    known = environment.get("SLURM_JOB_END_TIME", "")
    end_s = float(known) if known.isdigit() else _asked_end_s(job)
    return None if end_s is None else end_s - time.time()


def requeue(job: str) -> str | None:
    """Has a job queued again; Slurm kills it at once then. Returns why not, if it refuses."""
    try:
        done = _run("scontrol", "requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr.strip() or "refused" if done.returncode else None


def _asked_end_s(job: str) -> float | None:
    try:
        text = _run("squeue", "--noheader", "--job", job, "--format", "%e").stdout.strip()
        return datetime.fromisoformat(text).timestamp()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
