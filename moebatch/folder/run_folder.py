"""The folder beside an output in which everything is that outlives a run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moebatch.errors import StorageError
from moebatch.folder.shard import ALL, Shard
from moebatch.journal.files import storage_errors
from moebatch.journal.finished import journals
from moebatch.journal.lock import RunLock
from moebatch.spec.files.text_file import remove_drafts

_TRIES = 5


class RunFolder:
    """Of one output, for all runs of the job and all of its shards."""

    def __init__(self, output: Path) -> None:
        self.output = output
        target = Path(os.path.realpath(output))  # which says nothing against links in a circle
        self.path = target.parent / f"{target.name}.moebatch"  # the root has no name to change

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

    def status(self, shard: Shard) -> Path:
        """How far the last run of a shard is, or was."""
        return self.path / f"status-{shard.number}-of-{shard.count}.json"

    @contextmanager
    def locked(self, shard: Shard) -> Iterator[RunLock]:
        """No other process runs the shard, or all rows, while the block runs. Raises LockHeld, and
        StorageError where the folder cannot be written."""
        subject = str(self.path.with_suffix(""))
        with self._lock(subject, shared=not shard.is_all) as lock:
            if not shard.is_all:
                path = self.path / f"lock-{shard.number}-of-{shard.count}"
                with RunLock(path, subject=f"{subject}, shard {shard}") as lock:
                    yield lock
                return
            with suppress(OSError):  # what cannot be removed does no harm
                remove_drafts(self.path)
            try:
                yield lock
            finally:
                self._remove_if_empty()

    def _lock(self, subject: str, *, shared: bool, tries: int = _TRIES) -> RunLock:
        """Of the folder, which is made: a run that leaves nothing there may remove it meanwhile."""
        try:
            with storage_errors(self.path):
                self.path.mkdir(exist_ok=True)
            return RunLock(self.lock, subject=subject, shared=shared)
        except StorageError as error:
            # A folder that is removed while it is made is said to exist, and is none.
            if tries == 1 or not isinstance(error.__cause__, FileNotFoundError | FileExistsError):
                raise
        return self._lock(subject, shared=shared, tries=tries - 1)

    def _remove_if_empty(self) -> None:
        """A run that ended before its first row leaves nothing behind for later ones. Other runs
        of shards may be about to begin, so these leave the folder."""
        if journals(self.journal) or self.path.with_suffix("").exists():
            return
        with suppress(OSError):
            if self.journal.is_dir():
                self.journal.rmdir()
            # The lock last: what is there from then on is another run's.
            for path in (self.status(ALL), self.manifest, self.lock):
                path.unlink(missing_ok=True)
            self.path.rmdir()

    @property
    def statuses(self) -> list[Path]:
        return sorted(self.path.glob("status-*.json"))

    @property
    def journal_bytes(self) -> int:
        """Of all journals together. They only grow: where this is the same, so is what they say.
        Raises StorageError."""
        try:
            return sum(path.stat().st_size for path in journals(self.journal))
        except OSError as error:
            raise StorageError(f"{error.filename}: reading failed: {error.strerror}") from error

    @property
    def has_records(self) -> bool:
        """Whether any run has left rows. Raises StorageError."""
        return self.journal_bytes > 0
