"""What holds for a run of a job, however often it has to begin again in less memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from moebatch.engine.approximation import Approximation
from moebatch.folder.claim import Claim
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import Shard
from moebatch.job.limits import dram_bytes
from moebatch.job.opened import OpenedJob
from moebatch.job.options import RunOptions
from moebatch.job.stop import Stop
from moebatch.rows.prompts import RowReader
from moebatch.spec.job import Job

_LESS = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What an attempt needs to know."""

    job: Job
    """With the budgets that hold now."""
    opened: OpenedJob
    reader: RowReader
    claim: Claim
    shard: Shard
    folder: RunFolder
    options: RunOptions
    stop: Stop
    log: Callable[[str], None]

    @property
    def approximation(self) -> Approximation:
        """What changes the answers."""
        return self.opened.approximation

    def with_less_memory(self, vram_bytes: int | None) -> "RunContext":
        """The same with three quarters of the memory; `vram_bytes` are what it had of a GPU, if
        that is not what the job says."""
        resources = self.job.resources
        less = {"dram": int(dram_bytes(self.job) * _LESS)}
        if vram_bytes is None:
            vram_bytes = resources.vram
        if vram_bytes is not None:
            less["vram"] = int(vram_bytes * _LESS)
        job = self.job.model_copy(update={"resources": resources.model_copy(update=less)})
        return replace(self, job=job)
