"""What a run asks of Slurm, if it is there."""

import os
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime

_PATIENCE_S = 10.0
RESERVE_S = 90.0
"""Before the end of a job a run stops by itself: Slurm's own signal may come a minute late."""


def slurm_job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """As commands want it: that of the task, where it is one of an array."""
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


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
