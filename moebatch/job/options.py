"""What the command line of `moebatch run` says beside the job file."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from moebatch.errors import ConfigError
from moebatch.plan.options import ScheduleName
from moebatch.spec.option import Option, Options

if TYPE_CHECKING:  # `moebatch --help` need not load them
    from moebatch.folder.shard import AskedShard
    from moebatch.spec.machine.hardware import DeviceKind
    from moebatch.spec.policy.file import PolicyFile


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """What a check takes into account, as the run that comes after it will."""

    is_exact: Annotated[
        bool, Option("Refuse a job whose answers are not exactly the model's.", ("--exact",))
    ] = False
    limit: Annotated[
        int | None, Option("Only the first rows of the input, for a trial.", min=1)
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(CheckOptions, Options):
    """How a job is run. Nothing in it changes what is computed."""

    schedule: ScheduleName = None
    is_plain: Annotated[
        bool, Option("One task after the other, on the CPU: the reference.", ("--sync",))
    ] = False
    is_static: Annotated[
        bool, Option("Admit rows only when all of a batch have ended.", ("--static",))
    ] = False
    no_share: Annotated[
        bool, Option("Compute every row by itself, even if prompts begin alike.")
    ] = False
    trace_passes: Annotated[int, Option("Passes to trace.", min=1, max=1000)] = 8
    policy: "PolicyFile | None" = None
    """None plans the best one."""
    shard: "AskedShard | None" = None
    """Only its rows."""
    is_drawn: bool = False
    """Whether the traced passes are drawn."""
    command: str = "moebatch run"

    @property
    def shares(self) -> bool:
        """Whether rows and beginnings that are alike are computed once."""
        return not self.no_share

    @property
    def num_traced_passes(self) -> int:
        """None if nothing is drawn."""
        return self.trace_passes if self.is_drawn else 0

    def require_device(self, kind: "DeviceKind | None") -> None:
        """Raises ConfigError if the device is none that the options can do with; None is one that
        is not known yet."""
        if self.is_plain and kind not in (None, "cpu"):
            message = "computes in main memory, and this job on a GPU; set resources.device to cpu"
            raise ConfigError.at(self.command, message, where="--sync")

    def contradictions(self) -> Iterator[tuple[str, str]]:
        from moebatch.schedule.registry import unknown_schedule

        if self.schedule is not None:
            yield from (("--schedule", message) for message in unknown_schedule(self.schedule))
        if self.is_plain and self.schedule is not None:
            yield "--sync", "does everything one after the other; leave --schedule out"
        if self.is_plain and self.is_drawn:
            yield "--sync", "has no lanes to draw; leave --trace and --gantt out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What `moebatch sbatch` asks of the cluster."""

    num_shards: Annotated[int, Option("Tasks of the array.", ("--shards",), min=1, max=100_000)]
    time_limit: Annotated[
        str | None, Option("Limit of each task, as Slurm writes it: 4:00:00.", ("--time",))
    ] = None
    cpus: Annotated[int | None, Option("Cores of each task.", min=1)] = None
    options: Annotated[
        tuple[str, ...],
        Option("A further option of sbatch, such as partition=gpu; repeatable.", ("--option",)),
    ] = ()
