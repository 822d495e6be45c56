"""What the command line of `moebatch run` says beside the job file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moebatch.errors import ConfigError, Fault
from moebatch.folder.shard import AskedShard
from moebatch.measure.saved import require_writable_file
from moebatch.schedule.registry import unknown_schedule
from moebatch.spec.hardware import DeviceKind
from moebatch.spec.policy_file import PolicyFile


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a job is run. Nothing in it changes what is computed."""

    policy: PolicyFile | None = None
    """None plans the best one."""
    schedule: str | None = None
    """Instead of the policy's own."""
    is_plain: bool = False
    """Everything one after the other."""
    is_static: bool = False
    """A batch ends before the next one begins."""
    is_exact: bool = False
    """Nothing may change the answers."""
    shard: AskedShard | None = None
    """Only its rows."""
    limit: int | None = None
    """Only so many rows of the input, the first ones."""
    shares: bool = True
    """Rows and beginnings that are alike are computed once."""
    num_traced_passes: int = 8
    """So many passes are drawn, if anything is."""
    trace: Path | None = None
    """A Chrome trace."""
    gantt: Path | None = None
    """A picture."""

    @property
    def is_drawn(self) -> bool:
        """Whether timelines are wanted."""
        return self.trace is not None or self.gantt is not None

    def require_consistent(self) -> None:
        """Raises ConfigError for options that contradict each other, and StorageError for places
        that cannot be written."""
        faults = list(self._faults())
        if faults:
            raise ConfigError(faults)
        for path in (self.trace, self.gantt):
            if path is not None:
                require_writable_file(path)

    def require_device(self, kind: DeviceKind | None) -> None:
        """Raises ConfigError if the device is none that the options can do with; None is one that
        is not known yet."""
        if self.is_plain and kind not in (None, "cpu"):
            message = "computes in main memory, and this job on a GPU; set resources.device to cpu"
            raise ConfigError([_about("--sync", message)])

    def _faults(self) -> Iterator[Fault]:
        if self.schedule is not None:
            yield from (_about("--schedule", said) for said in unknown_schedule(self.schedule))
        if not self.is_plain:
            return
        if self.schedule is not None:
            yield _about("--sync", "does everything one after the other; leave --schedule out")
        if self.is_drawn:
            yield _about("--sync", "has no lanes to draw; leave --trace and --gantt out")


def _about(option: str, message: str) -> Fault:
    return Fault(file="moebatch run", where=option, message=message)
