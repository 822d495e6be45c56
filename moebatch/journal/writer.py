"""Appends records to a journal of its own."""

import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from moebatch.errors import StorageError
from moebatch.journal.files import Files, storage_errors, write_all
from moebatch.journal.record import Record, encode

COMMIT_S = 1.0
"""What was written longer ago than this is on the disk itself, not only with the system."""
COMMIT_ROWS = 4096
"""The same for so many records."""
SUFFIX = ".jsonl"


class JournalWriter:
    """One run's journal: no other process ever writes to it.

    A record is handed to the system at once, so that it survives the end of this process, however
    that comes; a thread has it written to the disk, together with all others of the last second.
    Used by one thread.
    """

    def __init__(self, folder: Path, *, files: Files | None = None) -> None:
        """A new file in `folder`, which is made. Raises StorageError."""
        self._files = files or Files()
        self.path = folder
        self._wake = threading.Condition()
        self._num_unsynced = 0
        self._failure: Exception | None = None
        self._is_closing = False
        self._end = 0
        with storage_errors(folder):
            self._files.make_folder(folder)
            self.path = folder / _new_name(folder)
            self._descriptor = self._files.create(self.path)
            self._files.sync_folder(folder)
        self._thread = threading.Thread(target=self._commit, name="journal", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """Appends one record. Raises StorageError if the disk is full or fails, now or for an
        earlier record; what is in the journal by then stays good."""
        data = encode(record)
        with storage_errors(self.path, needed=len(data)):
            self._raise_failure()
            try:
                write_all(self._files, self._descriptor, data)
            except OSError:
                self._cut()
                raise
        self._end += len(data)
        with self._wake:
            self._num_unsynced += 1
            if self._num_unsynced == 1 or self._num_unsynced >= COMMIT_ROWS:
                self._wake.notify()

    def close(self) -> None:
        """Returns when everything is on the disk. Raises StorageError."""
        with self._wake:
            if self._is_closing:
                return
            self._is_closing = True
            self._wake.notify()
        self._thread.join()
        with storage_errors(self.path):
            self._files.close(self._descriptor)
            if not self._end:
                self._files.remove(self.path)
            self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StorageError:
            if error is None:
                raise

    def _cut(self) -> None:
        """Takes back half a record. Where that fails too, it stays as a torn tail, which readers
        leave out."""
        try:
            self._files.cut(self._descriptor, self._end)
        except OSError as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _commit(self) -> None:
        while self._wait_for_work():
            self._num_unsynced = 0
            try:
                self._files.sync(self._descriptor)
                self._files.require_there(self._descriptor, self.path)
            except Exception as error:  # Whatever it is must reach the thread that adds records.
                self._failure = error
                return

    def _wait_for_work(self) -> bool:
        """Waits until something has been there for a second, or much of it; False at the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._num_unsynced or self._is_closing)
            if not self._is_closing:
                self._wake.wait_for(
                    lambda: self._num_unsynced >= COMMIT_ROWS or self._is_closing, COMMIT_S
                )
            return self._num_unsynced > 0


def _new_name(folder: Path) -> str:
    """Sorted by name, journals are in the order in which they were begun: also where a clock was
    set back, or another host had one that was fast. Raises OSError."""
    begun = (path.name.partition("-")[0] for path in folder.glob(f"*{SUFFIX}"))
    newest = max((int(number) for number in begun if number.isdecimal()), default=0)
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())
    return f"{max(time.time_ns(), newest + 1):020d}-{host}-{os.getpid()}{SUFFIX}"
