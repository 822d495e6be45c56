"""Where unfinished work is kept: a folder beside what it is to become, and a record of how far it
has come. Calibrations and packs that were broken off go on from there."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from pydantic import BaseModel

from moebatch.errors import CheckpointError
from moebatch.journal.files import storage_errors
from moebatch.journal.lock import RunLock
from moebatch.spec.files.text_file import remove_drafts, write_text

Record = TypeVar("Record", bound=BaseModel)


class WorkFolder:
    """What is finished of some work, and a record that says what can be believed."""

    def __init__(self, path: Path, *, subject: Path, lock: Path | None = None) -> None:
        """`subject` is what the work is to become, for messages. The file `lock` is removed in the
        end: a name that no file of the user has."""
        self.path = path
        self.record = path / "record"
        self.lock = lock or path.with_suffix(".lock")
        self._subject = str(subject)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process works on the same while the block runs. Raises LockHeld, and
        StorageError where nothing can be written."""
        with RunLock(self.lock, subject=self._subject, elsewhere="another --output"):
            try:
                with storage_errors(self.path):
                    self.path.mkdir(exist_ok=True)
                    remove_drafts(self.path)
                yield
            finally:
                if self.path.exists() and not self.record.exists():
                    self.remove()
                with suppress(OSError):
                    self.lock.unlink()

    def save(self, record: BaseModel) -> None:
        """Puts a record in the place of the earlier one in a single step. Raises StorageError."""
        text = record.model_dump_json()
        write_text(self.record, f"{crc32(text.encode()):08x} {text}\n")

    def load(self, kind: type[Record]) -> Record | None:
        """The record that `save` has written, if there is one. Raises CheckpointError if it is
        damaged, or of another kind."""
        with suppress(OSError, ValueError):
            if not self.record.exists():
                return None
            checksum, text = self.record.read_text().rstrip("\n").split(" ", 1)
            if checksum == f"{crc32(text.encode()):08x}":
                return kind.model_validate_json(text)
        raise CheckpointError(f"{self.record}: is damaged")

    def clear(self) -> None:
        """Removes what there is, the record first: nothing is believed without it. Raises
        StorageError."""
        with storage_errors(self.path):
            self.record.unlink(missing_ok=True)
            for path in self.path.iterdir():
                path.unlink()

    def remove(self) -> None:
        """Removes the folder. What cannot be removed does no harm."""
        with suppress(OSError):
            self.record.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
