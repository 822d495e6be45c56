"""Reading files past the page cache, straight into buffers that the program owns."""

import errno
import os
from pathlib import Path

from moebatch.errors import StorageError, transfer_error
from moebatch.journal.files import stamp_of

PAGE_BYTES = 4096
"""Alignment that O_DIRECT accepts on every device in use."""


def align_up(num_bytes: int, alignment: int = PAGE_BYTES) -> int:
    """The next multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


def changed(path: Path) -> str:
    """What is wrong with a file that is no longer what it was when its header was read."""
    return f"{path}: was changed while it was in use; run this again"


class DirectFile:
    """A file opened for O_DIRECT reads, or for buffered ones where the system refuses them.

    Offsets and lengths are multiples of `PAGE_BYTES`. Reading past the page cache is several
    times faster than through it, costs almost no CPU, and does not push the user's other data
    out of memory. Safe to use from several threads at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_direct = hasattr(os, "O_DIRECT")
        try:
            self._fd = self._open()
            status = os.fstat(self._fd)
        except OSError as error:
            raise StorageError(f"{path}: cannot be opened: {error.strerror}") from error
        self.num_bytes = status.st_size
        self._stamp = stamp_of(status)

    def require(self, num_bytes: int) -> None:
        """Raises StorageError if the file has become shorter than its header says it is."""
        if self.num_bytes < num_bytes:
            raise self._changed()

    def read(self, target: memoryview, offset: int) -> None:
        """Fills `target` from `offset`; bytes past the end of the file are left as they are, so
        `require` first those that must be there.

        Raises StorageError when the device fails or the file was written again since it was
        opened, and OutOfMemory when the system refuses memory.
        """
        assert offset % PAGE_BYTES == 0, "O_DIRECT needs aligned offsets"
        wanted = min(len(target), self.num_bytes - offset)
        done = 0
        while done < wanted:
            # A short read may end off a block border; going back to it keeps O_DIRECT content.
            start = done - done % PAGE_BYTES
            try:
                count = os.preadv(self._fd, [target[start:]], offset + start)
                is_same = stamp_of(os.fstat(self._fd)) == self._stamp
            except OSError as error:
                message = f"{self.path}: reading at byte {offset + start} failed"
                raise transfer_error(error, message) from error
            if not is_same or start + count <= done:
                raise self._changed()
            done = start + count
        if not self.is_direct:
            os.posix_fadvise(self._fd, offset, len(target), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self._fd)

    def _changed(self) -> StorageError:
        return StorageError(changed(self.path))

    def _open(self) -> int:
        if self.is_direct:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False  # some file systems, tmpfs among them, know no O_DIRECT
        return os.open(self.path, os.O_RDONLY)
