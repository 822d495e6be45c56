"""What all jobs of a benchmark have in common."""

import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.shape import ModelShape
from tests.shapes import load_shape


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Model, machine and limits."""

    folder: Path
    """Of everything that the benchmark makes."""
    checkpoint: Path
    cap_bytes: int
    """Of all memory of a run's process, page cache included."""
    dram_bytes: int
    """What the job is given: less, for the page cache that Python and torch come through."""

    @property
    def profile(self) -> Path:
        """Of this machine."""
        return self.folder / "profile.yaml"

    @cached_property
    def profile_disk_rate(self) -> float:
        """Bytes per second that plans count on."""
        return load_profile(str(self.profile)).hardware().links["disk->dram"].bandwidth

    @cached_property
    def shape(self) -> ModelShape:
        return load_shape(self.checkpoint)

    def measure_machine(self) -> None:
        """Writes the profile anew, by `moebatch profile`: about three minutes."""
        command = [sys.executable, "-m", "moebatch", "profile", "--quiet"]
        command += ["--read", str(self.checkpoint), "-o", str(self.profile)]
        subprocess.run(command, check=True, cwd=self.folder)
