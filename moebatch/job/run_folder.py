"""The folder beside an output in which everything is that outlives a run."""

from pathlib import Path

from moebatch.job.shard import Shard
from moebatch.journal.finished import journals


class RunFolder:
    """Of one output, whoever runs the job, and in how many shards."""

    def __init__(self, output: Path) -> None:
        target = output.resolve()
        self.path = target.with_name(target.name + ".moebatch")

    @property
    def journal(self) -> Path:
        """Folder of the journals, one file for every run."""
        return self.path / "journal"

    @property
    def manifest(self) -> Path:
        """What job it belongs to."""
        return self.path / "manifest.json"

    @property
    def lock(self) -> Path:
        """Held by a run of all rows, or shared by those of shards."""
        return self.path / "lock"

    def shard_lock(self, shard: Shard) -> Path:
        """Held by the run of a shard."""
        return self.path / f"lock-{shard.number}-of-{shard.count}"

    def status(self, shard: Shard) -> Path:
        """How far the last run of a shard is, or was."""
        return self.path / f"status-{shard.number}-of-{shard.count}.json"

    @property
    def statuses(self) -> list[Path]:
        """Those of all shards."""
        return sorted(self.path.glob("status-*.json"))

    @property
    def has_records(self) -> bool:
        """Whether any run has left rows."""
        return any(path.stat().st_size > 0 for path in journals(self.journal))
