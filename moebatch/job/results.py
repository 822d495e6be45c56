"""Finished rows, kept on disk in the order in which they finish, and at the end put in order."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self, cast

from moebatch.errors import LockHeld, StorageError
from moebatch.job.output_path import records_path, run_folder
from moebatch.units import format_bytes

_LINE_KEY = b'"line":'


class ResultFile:
    """The output of a run: gather rows with `add`, then write the files with `finish`.

    Rows go to ``<output>.moebatch/records.jsonl`` as ``{"index": …, "failed": …, "line": {…}}``.
    In memory there are nine bytes per row. The output itself is replaced in one step, so that
    there is either the old one or all of the new one. The run folder goes when that is done.
    """

    def __init__(self, path: Path, *, num_rows: int, errors: Path | None = None) -> None:
        """Starts a run folder anew. Raises LockHeld if another run uses it."""
        self._path = path.resolve()
        self._errors = None if errors is None else errors.resolve()
        self._folder = run_folder(path)
        self._offsets = array("q", [-1]) * num_rows
        self._failed = bytearray(num_rows)
        self._end = 0
        self._num_done = 0
        self._records = self._open()

    @property
    def num_done(self) -> int:
        """Rows that have been added, failed ones included."""
        return self._num_done

    @property
    def num_failed(self) -> int:
        """Rows that were added as failed."""
        return sum(self._failed)

    def add(self, index: int, line: bytes, *, failed: bool) -> None:
        """Keeps one finished row: its place in the input and its line of JSON, without newline.

        Raises StorageError if the disk is full or fails.
        """
        assert self._offsets[index] < 0, f"row {index} has finished twice"
        flag = json.dumps(failed)
        record = f'{{"index":{index},"failed":{flag},'.encode() + _LINE_KEY + line + b"}\n"
        with _told(self._folder, needed=len(record)):
            rest = memoryview(record)
            while rest:
                rest = rest[self._records.write(rest) :]
        self._offsets[index] = self._end
        self._failed[index] = failed
        self._end += len(record)
        self._num_done += 1

    def finish(self) -> None:
        """Writes the output in the order of the input, and removes the run folder.

        Raises StorageError if the disk is full or fails; the rows are kept then.
        """
        assert self._num_done == len(self._offsets), "rows are missing; finish comes last"
        split = self._errors is not None
        with _told(self._path, needed=self._end):
            if self._errors is not None:
                self._write(self._errors, failed=True)
            self._write(self._path, failed=False if split else None)
            # Removed while it is still locked, so that no other run can have begun in it.
            records_path(self._path).unlink()
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # stays where it holds something else, such as a manifest
            self.close()

    def close(self) -> None:
        """Lets go of the run folder and leaves it as it is."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> IO[bytes]:
        path = records_path(self._path)
        with _told(self._folder, needed=0):
            self._folder.mkdir(exist_ok=True)
            # Unbuffered, so that what was added is in the file whatever becomes of us.
            records = path.open("ab", buffering=0)
        try:
            with _told(self._folder, needed=0):
                if not _locked(records, path):
                    raise LockHeld(
                        f"{self._path}: another run is writing this output and holds "
                        f"{self._folder}; wait for its end, or choose another output.path"
                    )
                records.truncate(0)
        except BaseException:
            records.close()
            raise
        return cast(IO[bytes], records)

    def _write(self, path: Path, *, failed: bool | None) -> None:
        """Writes rows to a file: those that failed, those that did not, or all."""
        # Beside its target, since a rename works only within a file system.
        draft = path.with_name(f".{path.name}.moebatch-draft")
        try:
            with draft.open("wb") as file:
                with _compressed(file, path) as stream:
                    for index, line in enumerate(self._lines()):
                        if failed is None or failed == self._failed[index]:
                            stream.write(line)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            _sync_folder(path.parent)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _lines(self) -> Iterator[bytes]:
        with records_path(self._path).open("rb") as records:
            for offset in self._offsets:
                records.seek(offset)
                record = records.readline()
                start = record.index(_LINE_KEY) + len(_LINE_KEY)
                yield record[start:-2] + b"\n"


def _locked(records: IO[bytes], path: Path) -> bool:
    """Whether the file is ours alone, and still the one at its path."""
    try:
        fcntl.flock(records, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that has just ended may have removed it between opening and locking.
        return os.path.samestat(path.stat(), os.fstat(records.fileno()))
    except (BlockingIOError, FileNotFoundError):
        return False


@contextlib.contextmanager
def _compressed(file: BinaryIO, path: Path) -> Iterator[BinaryIO]:
    if path.suffix.lower() != ".gz":
        yield file
        return
    # Neither name nor time, so that a re-run has the same bytes.
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as stream:
        yield cast(BinaryIO, stream)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not sync folders; their renames last all the same.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _told(path: Path, *, needed: int) -> Iterator[None]:
    """Turns what the operating system says into what the user needs to know."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(f"{path}: writing failed: {error.strerror or error}") from error
        raise StorageError(
            f"{path}: no room left: {format_bytes(needed)} ({needed} bytes) to write, "
            f"{_free(path)} free; make room and run the job again"
        ) from error


def _free(path: Path) -> str:
    try:
        return format_bytes(shutil.disk_usage(path.parent).free)
    except OSError:
        return "an unknown number of bytes"
