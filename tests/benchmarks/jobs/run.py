"""One run of `moebatch run` in a process of its own, under the memory cap."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.jobs.memory_cap import memory_cap
from tests.benchmarks.jobs.setting import Setting

_DISK = "disk->dram"


class RunFailed(Exception):
    """The run did not end well; the message has the end of what it said."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run says of itself, and what is seen from outside."""

    summary: dict[str, Any]
    wall_s: float
    """From the start of the process to its end."""
    cgroup_peak_bytes: int | None
    planned_bytes: float
    """That the plan reads from disk."""

    @property
    def passes_s(self) -> float:
        """From the first pass to the last."""
        return float(self.summary["elapsed_s"])

    @property
    def predicted_s(self) -> float | None:
        """The same, as it was predicted before the first pass."""
        return self._job_time_s("prediction")

    @property
    def hindsight_s(self) -> float | None:
        """Predicted with the rate that the disk had during the run."""
        return self._job_time_s("hindsight")

    @property
    def disk_share(self) -> float:
        """Part of the passes' time in which the disk was busy, 0..1."""
        return min(1.0, self._disk_busy_s / self.passes_s)

    @property
    def disk_rate(self) -> float:
        """Bytes per second while the disk was busy: so much it has given at the least."""
        return float(self.summary["bytes_read"]) / self._disk_busy_s if self._disk_busy_s else 0.0

    @property
    def peak_bytes(self) -> int:
        """Of the process."""
        return int(self.summary["peak_bytes"])

    @property
    def _disk_busy_s(self) -> float:
        lanes = self.summary["lanes"]
        return float(sum(lane["busy_s"] for lane in lanes if lane["name"] == _DISK))

    def _job_time_s(self, name: str) -> float | None:
        prediction = self.summary[name]
        return None if prediction is None else float(prediction["job_time_s"])


def run_job(setting: Setting, rows: Path, options: Sequence[str] = ()) -> Run:
    """Answers the rows. Raises RunFailed."""
    folder = rows.parent
    job, summary, answers = (folder / name for name in ("job.yaml", "summary.json", "out.jsonl"))
    for path in (summary, answers):
        path.unlink(missing_ok=True)
    shutil.rmtree(f"{answers}.moebatch", ignore_errors=True)  # answers of other weights, or earlier
    job.write_text(yaml.safe_dump(_job(setting, rows, answers)))
    command = [sys.executable, "-m", "tests.benchmarks.jobs.measured_run", str(summary)]
    command += ["run", str(job), "--quiet", *options]
    with memory_cap(setting.cap_bytes) as cap:
        start = time.perf_counter()
        done = subprocess.run(cap.wrapped(command), capture_output=True, text=True, check=False)
        wall_s = time.perf_counter() - start
        peak = cap.peak_bytes
    if done.returncode != 0 or not summary.is_file():
        lines = done.stderr.strip().splitlines()[-3:]
        raise RunFailed(f"exit code {done.returncode}: {' / '.join(lines)}")
    figures = json.loads(summary.read_text())
    planned_s = (figures["prediction"] or {}).get("busy_s", {}).get(_DISK, 0.0)
    return Run(
        summary=figures,
        wall_s=wall_s,
        cgroup_peak_bytes=peak,
        planned_bytes=planned_s * setting.profile_disk_rate,
    )


def run_options() -> str:
    """What `moebatch run --help` says."""
    command = [sys.executable, "-m", "moebatch", "run", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _job(setting: Setting, rows: Path, answers: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(setting.checkpoint)},
        "input": {"path": str(rows)},
        "output": {"path": str(answers), "format": "plain"},
        "sampling": {"temperature": 0},
        "resources": {"dram": setting.dram_bytes, "hardware": str(setting.profile)},
    }
