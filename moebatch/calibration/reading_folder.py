"""Where an unfinished calibration is kept: a folder beside the table that it is to write."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moebatch.journal.files import told
from moebatch.journal.lock import RunLock


class ReadingFolder:
    """What gates say, and a record of it. Gone when the calibration has ended well."""

    def __init__(self, table: Path) -> None:
        self.path = table.with_name(f"{table.stem}.reading")
        self.record = self.path / "record"
        self._lock = table.with_name(f"{table.stem}.lock")
        self._subject = str(table)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes the same table while the block runs. Raises LockHeld, and StorageError
        where nothing can be written."""
        with RunLock(self._lock, subject=self._subject, elsewhere="another --output"):
            try:
                with told(self.path, needed=0):
                    self.path.mkdir(exist_ok=True)
                yield
            finally:
                if not self.record.exists():
                    self.remove()
                with suppress(OSError):
                    self._lock.unlink()

    def clear(self) -> None:
        """Removes what there is, the record first: nothing is believed without it. Raises
        StorageError."""
        with told(self.path, needed=0):
            self.record.unlink(missing_ok=True)
            for path in self.path.iterdir():
                path.unlink()

    def remove(self) -> None:
        """Removes the folder. What cannot be removed is in nobody's way."""
        with suppress(OSError):
            self.record.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
