"""What a run keeps on disk, layer by layer: a scratch file, gone with the process."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from moebatch.checkpoint.direct import PAGE_BYTES
from moebatch.errors import StorageError, transfer_error
from moebatch.journal.files import take_room
from moebatch.units import format_bytes

_MAX_BUFFERS = 1024
"""What Linux takes in one call."""
_Buffers = list[memoryview]
_AT_ONCE = 4
"""Calls in flight. Runs of 32, 64 and 160 KiB came at 1.8, 1.6 and 1.4 times the rate of one after
the other from a disk of 3.5 GB/s, with eight in flight at 1.2, 1.1 and 1.1 times that of four."""


class PageRun(NamedTuple):
    """Pages that follow each other, from `first` on, and what is filled from them or stored as
    them: the parts of each in turn."""

    first: int
    buffers: Sequence[memoryview]


class LayerPages(NamedTuple):
    """What a layer has on disk."""

    num_pages: int
    part_bytes: Sequence[int]
    """Of each part of a page."""


class ScratchFile:
    """Pages of layers, one layer after the other; of a page one part after the other.

    The file has no name once it is open, so nothing is left of it however the process ends. It is
    read and written past the page cache where blocks of the device fit into pages and the system
    allows it. Safe to use from several threads at once.
    """

    def __init__(
        self, folder: Path, layers: Sequence[LayerPages], *, what: str = "keys and values"
    ) -> None:
        """Takes the room for so many layers; `what` is kept of them, in words.

        Raises StorageError when `folder` is not there, or has too little room.
        """
        self.folder, self._what = folder, what
        self._page_bytes = [sum(layer.part_bytes) for layer in layers]
        sizes = (sum(layer.part_bytes) * layer.num_pages for layer in layers)
        *self._starts, self.num_bytes = accumulate(sizes, initial=0)
        self._fd, self.is_direct = _open(
            folder,
            self.num_bytes,
            what,
            all(part % PAGE_BYTES == 0 for layer in layers for part in layer.part_bytes),
        )
        self._calls = ThreadPoolExecutor(_AT_ONCE, "scratch file")

    def read(self, layer: int, runs: Sequence[PageRun]) -> None:
        """Fills the buffers of all runs, in any order.

        Raises StorageError when the device fails, and OutOfMemory when the system refuses memory.
        """
        self._transfer_all(lambda run: self._transfer(os.preadv, layer, run, "reading"), runs)

    def write(self, layer: int, runs: Sequence[PageRun]) -> None:
        """Stores the buffers of all runs, in any order.

        Raises StorageError when the device fails, and OutOfMemory when the system refuses memory.
        """
        self._transfer_all(lambda run: self._transfer(os.pwritev, layer, run, "writing"), runs)

    def close(self) -> None:
        """Gives the file and its room back."""
        self._calls.shutdown()
        os.close(self._fd)

    def _transfer_all(self, transfer: Callable[[PageRun], None], runs: Sequence[PageRun]) -> None:
        """Each thread takes every so-many-th run; nothing is in flight any more on return."""
        if len(runs) == 1:
            transfer(runs[0])
            return

        def transfer_some(first: int) -> None:
            for run in runs[first::_AT_ONCE]:
                transfer(run)

        shares = range(min(_AT_ONCE, len(runs)))
        done, _ = wait([self._calls.submit(transfer_some, first) for first in shares])
        for share in done:
            share.result()

    def _transfer(
        self, call: Callable[[int, _Buffers, int], int], layer: int, run: PageRun, doing: str
    ) -> None:
        buffers = run.buffers
        offset = self._starts[layer] + run.first * self._page_bytes[layer]
        wanted, done = sum(map(len, buffers)), 0
        while done < wanted:
            # A short transfer may end off a block border; going back to it keeps O_DIRECT content.
            start = done - done % PAGE_BYTES if self.is_direct else done
            try:
                count = call(self._fd, _from(buffers, start), offset + start)
            except OSError as error:
                message = f"{self.folder}: {doing} {self._what} failed"
                raise transfer_error(error, message) from error
            if start + count <= done:
                raise StorageError(f"{self.folder}: {doing} {self._what} came to an early end")
            done = start + count


def _from(buffers: Sequence[memoryview], start: int) -> _Buffers:
    """What is left of `buffers` after `start` bytes, as much as one call takes."""
    first = 0
    while start >= len(buffers[first]):
        start -= len(buffers[first])
        first += 1
    return [buffers[first][start:], *buffers[first + 1 : first + _MAX_BUFFERS]]


def _open(folder: Path, num_bytes: int, what: str, may_be_direct: bool) -> tuple[int, bool]:
    """A descriptor of a nameless file with its room reserved, and whether it is for O_DIRECT."""
    try:
        fd, name = tempfile.mkstemp(prefix=".moebatch-scratch-", dir=folder)
    except OSError as error:
        raise StorageError(f"{folder}: {what} cannot be kept there: {error.strerror}") from error
    Path(name).unlink()  # before its room is taken, which may last, and be ended by a kill
    try:
        _reserve(fd, folder, num_bytes)
        return fd, may_be_direct and _made_direct(fd)
    except OSError as error:
        os.close(fd)
        raise StorageError(_no_room(folder, num_bytes, what, error)) from error


def _reserve(fd: int, folder: Path, num_bytes: int) -> None:
    """Takes the room now, so that the disk cannot become full in the middle of the night."""
    if num_bytes > _free_bytes(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    take_room(fd, num_bytes)


def _made_direct(fd: int) -> bool:
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # some file systems, tmpfs among them, know no O_DIRECT
    return True


def _no_room(folder: Path, num_bytes: int, what: str, error: OSError) -> str:
    return (
        f"{folder}: {what} on disk need {format_bytes(num_bytes)}, "
        f"{format_bytes(_free_bytes(folder))} are free there ({error.strerror}); "
        "name a folder with more room, or plan with a smaller disk budget"
    )


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
