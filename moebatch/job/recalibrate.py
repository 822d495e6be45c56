"""What a run teaches about its machine, kept in the machine's profile."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from moebatch.errors import ConfigError, Fault
from moebatch.job.status import RunSummary
from moebatch.measure.saved import save_profile, this_machine_path
from moebatch.spec.hardware import LevelName
from moebatch.spec.job import Job
from moebatch.spec.library import is_path
from moebatch.spec.profile import HardwareProfile
from moebatch.units import format_rate

_LEAST_BUSY_S = 5.0
"""A lane that was busy for less says little."""
_MOST_FACTOR = 4.0
"""More than that between prediction and measurement is no matter of calibration."""

_PROCESSORS: Mapping[str, LevelName] = {"cpu": "dram", "gpu": "vram"}
"""Levels by their lanes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """A corrected profile, and in words what was corrected."""

    profile: HardwareProfile
    lines: tuple[str, ...]


def lesson(profile: HardwareProfile, summary: RunSummary) -> Lesson:
    """The rate of the disk and the speed of CPU and GPU that the run has shown.

    A single factor for everything that a processor does: a run does not tell its parts apart.
    """
    busy = {lane.name: lane.busy_s for lane in summary.lanes}
    source, lines = f"a run of {date.today().isoformat()}", []
    disk_s = busy.get("disk->dram", 0.0)
    if summary.bytes_read and disk_s >= _LEAST_BUSY_S:
        rate = summary.bytes_read / disk_s
        profile = profile.with_measured_link("disk->dram", rate, source)
        lines.append(f"disk->dram achieves {format_rate(rate)}")
    for lane, level in _PROCESSORS.items():
        expected = summary.hindsight or summary.prediction
        expected_s = expected.busy_s.get(lane, 0.0) if expected else 0.0
        measured_s = busy.get(lane, 0.0)
        if expected_s and measured_s >= _LEAST_BUSY_S:
            factor = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, expected_s / measured_s))
            profile = profile.with_scaled_level(level, factor, source)
            lines.append(f"the {lane.upper()} achieves {factor:.2f} times what was expected of it")
    return Lesson(profile=profile, lines=tuple(lines))


def keep(job: Job, learnt: Lesson) -> Path:
    """Writes the profile to where the job has it from: a file of its own, or this machine's.

    Raises StorageError, and ConfigError where the figures are of no machine of the user's: those
    that come with moebatch, or a few seconds' measurement.
    """
    hardware = job.resources.hardware
    path = Path(hardware) if is_path(hardware) else this_machine_path()
    if (hardware != "auto" and not is_path(hardware)) or not path.is_file():
        message = "there is no profile of this machine to correct; run `moebatch profile` first"
        raise ConfigError([Fault(file="--recalibrate", message=message)])
    save_profile(learnt.profile, path)
    return path
