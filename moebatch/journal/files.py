"""What a journal asks of the file system, in one place, so that tests can make any of it fail."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from moebatch.errors import StorageError
from moebatch.quoting import system_reason
from moebatch.units import format_bytes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota or a limit."""
_BUFFER_BYTES = 2**20
_ROOM_BYTES = 2**28
"""At once, of room that is taken: a signal is handled between two calls, and file systems without a
call for it are written to, block by block."""
_DRAFT = ".{}.moebatch-draft"
NUM_ADDED = len(_DRAFT.format(""))
"""Bytes by which the name of a draft is longer than that of its file."""
Stamp = tuple[int, int, int, int]
_GONE = "it was moved or removed meanwhile; put it back if it is anywhere, and run the job again"
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


class Files:
    """The file system as it is. Every method raises OSError."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder unless it is there."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """Opens a new file to append to. Raises FileExistsError if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        return os.open(path, flags, 0o666)

    def write(self, descriptor: int, data: bytes) -> int:
        """Appends what the system takes at once, and says how much that was."""
        return os.write(descriptor, data)

    def cut(self, descriptor: int, num_bytes: int) -> None:
        """Shortens a file to so many bytes."""
        os.ftruncate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """Returns when what was written outlives a loss of power."""
        os.fsync(descriptor)

    def require_there(self, descriptor: int, path: Path) -> None:
        """Raises FileNotFoundError unless an open file is still the one of that name: what is
        written into one that was removed is lost."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return
        raise FileNotFoundError(errno.ENOENT, _GONE)

    def close(self, descriptor: int) -> None:
        """Gives a descriptor back."""
        os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Puts a file in the place of another one in a single step."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there."""
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Returns when names in the folder outlive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems do not sync folders; their renames last all the same.
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)


def stamp_of(status: os.stat_result) -> Stamp:
    """What changes when a file is written again: its identity, size and time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def write_all(files: Files, descriptor: int, data: bytes) -> None:
    """Appends all of it. Raises OSError; a part may have been written then."""
    rest = memoryview(data)
    while rest:
        rest = rest[files.write(descriptor, bytes(rest)) :]


def take_room(descriptor: int, num_bytes: int) -> None:
    """Makes a file so long, with room on the disk for all of it: nothing is written into it later
    that the disk has no room for. Raises OSError."""
    for start in range(0, num_bytes, _ROOM_BYTES):
        os.posix_fallocate(descriptor, start, min(_ROOM_BYTES, num_bytes - start))


class NewFile:
    """A new file that is written from its beginning to its end. All methods raise OSError."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._descriptor = files.create(path)
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        """Appends all of it, sooner or later."""
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Hands everything to the system."""
        write_all(self._files, self._descriptor, bytes(self._buffer))
        self._buffer.clear()

    def sync(self) -> None:
        """Returns when everything outlives a loss of power."""
        self.flush()
        self._files.sync(self._descriptor)

    def close(self) -> None:
        """Gives the descriptor back."""
        self._files.close(self._descriptor)


@contextmanager
def replacing(files: Files, path: Path) -> Iterator[NewFile]:
    """A file that takes the place of `path` in one step, on the disk, and only if the block ends
    without an error. Raises OSError."""
    # Beside its target, since a rename works only within a file system.
    draft = path.with_name(_DRAFT.format(path.name))
    files.remove(draft)  # of a run that was killed
    try:
        with closing(NewFile(files, draft)) as file:
            yield file
            file.sync()
        files.replace(draft, path)
        files.sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            files.remove(draft)
        raise


@contextmanager
def storage_errors(path: Path, *, needed: int = 0) -> Iterator[None]:
    """Turns what the operating system says of `path` into what the user needs to know: raises
    StorageError. `needed` are the bytes that were to be written, where that is known."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise StorageError(f"{path}: writing failed: {system_reason(error)}") from error
        raise StorageError(
            f"{path}: no room left: {', '.join(_room(error, path, needed))}; make room and run the "
            "job again"
        ) from error


def _room(error: OSError, path: Path, needed: int) -> Iterator[str]:
    """What is needed and what there is; where a quota or a limit is what forbids more, free bytes
    of the disk are beside the point."""
    if needed:
        yield f"{format_bytes(needed)} to write"
    if error.errno != errno.ENOSPC:
        yield f"{error.strerror}"
        return
    try:
        yield f"{format_bytes(shutil.disk_usage(path.parent).free)} free"
    except OSError:
        yield "an unknown number of bytes free"
