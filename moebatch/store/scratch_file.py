"""What a run keeps on disk, layer by layer: a scratch file, gone with the process."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES
from moebatch.errors import StorageError, transfer_error
from moebatch.journal.files import take_room
from moebatch.store.async_io import READ, WRITE, AsyncIO, Transfers
from moebatch.units import format_bytes

_MAX_BUFFERS = 1024
"""What Linux takes in one call."""


class PageRuns(NamedTuple):
    """Pages to be moved, in runs that follow each other in the file."""

    firsts: NDArray[np.int64]
    """In the file, where each run begins."""
    lengths: NDArray[np.int64]
    """Pages of each run."""
    places: NDArray[np.int64]
    """Where pages are in memory, of one run after the other."""

    @classmethod
    def of(cls, pages: NDArray[np.int64], places: NDArray[np.int64]) -> "PageRuns":
        """As few runs as can be: ``pages[i]``, in ascending order, is at ``places[i]``."""
        begins = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
        return cls(pages[begins], np.diff(begins, append=len(pages)), places)

    def cut(self, most: int) -> "PageRuns":
        """The same in runs of so many pages at most."""
        if self.lengths.max(initial=0) <= most:
            return self
        firsts, lengths = self.firsts.tolist(), self.lengths.tolist()
        pieces = [
            (first + done, min(most, length - done))
            for first, length in zip(firsts, lengths, strict=True)
            for done in range(0, length, most)
        ]
        cut_firsts, cut_lengths = np.array(pieces, np.int64).T
        return PageRuns(cut_firsts, cut_lengths, self.places)


class LayerPages(NamedTuple):
    """What a layer has on disk."""

    num_pages: int
    part_bytes: Sequence[int]
    """Of each part of a page."""


class _Way(NamedTuple):
    """Reading, or writing."""

    doing: str
    code: int
    call: str
    """What moves one run, of `os`."""


_READING, _WRITING = _Way("reading", READ, "preadv"), _Way("writing", WRITE, "pwritev")


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
        self._at_once = {way: _async_io() for way in (_READING, _WRITING)}

    def read(self, layer: int, runs: PageRuns, parts: Sequence[Tensor]) -> None:
        """Fills pages in memory: of each part [places, bytes of a page], uint8.

        Raises StorageError when the device fails, and OutOfMemory when the system refuses memory.
        """
        self._transfer(_READING, layer, runs, parts)

    def write(self, layer: int, runs: PageRuns, parts: Sequence[Tensor]) -> None:
        """Stores pages that are in memory: of each part [places, bytes of a page], uint8.

        Raises StorageError when the device fails, and OutOfMemory when the system refuses memory.
        """
        self._transfer(_WRITING, layer, runs, parts)

    def close(self) -> None:
        """Gives the file and its room back."""
        for calls in self._at_once.values():
            if calls is not None:
                calls.close()
        os.close(self._fd)

    def _transfer(self, way: _Way, layer: int, runs: PageRuns, parts: Sequence[Tensor]) -> None:
        runs = runs.cut(_MAX_BUFFERS // len(parts))
        offsets = self._starts[layer] + runs.firsts * self._page_bytes[layer]
        wanted = runs.lengths * self._page_bytes[layer]
        done = self._moved_at_once(way, runs, offsets, parts)
        stops = runs.lengths.cumsum()
        for run in np.flatnonzero(done < wanted).tolist():
            places = runs.places[stops[run] - runs.lengths[run] : stops[run]]
            buffers = [part[place].numpy().data for place in places.tolist() for part in parts]
            self._move_rest(way, buffers, int(offsets[run]), max(0, int(done[run])))

    def _moved_at_once(
        self, way: _Way, runs: PageRuns, offsets: NDArray[np.int64], parts: Sequence[Tensor]
    ) -> NDArray[np.int64]:
        """Bytes of each run that have been moved, or less than 0 of one that failed."""
        calls = self._at_once[way]
        if calls is None or not len(runs.firsts):
            return np.zeros(len(runs.firsts), np.int64)
        buffers = np.empty((len(runs.places), len(parts), 2), np.uint64)
        for number, part in enumerate(parts):
            num_bytes = part.stride(0)
            buffers[:, number, 0] = part.data_ptr() + runs.places * num_bytes
            buffers[:, number, 1] = num_bytes
        transfers = Transfers(buffers.reshape(-1, 2), runs.lengths * len(parts), offsets)
        try:
            return calls.run(self._fd, way.code, transfers)
        except OSError:
            return np.zeros(len(runs.firsts), np.int64)

    def _move_rest(self, way: _Way, buffers: list[memoryview], offset: int, done: int) -> None:
        """Of a run of which so many bytes are done: all of them, or what the system says."""
        call, wanted = getattr(os, way.call), sum(map(len, buffers))
        while done < wanted:
            # A short transfer may end off a block border; going back to it keeps O_DIRECT content.
            start = done - done % PAGE_BYTES if self.is_direct else done
            try:
                count = call(self._fd, _from(buffers, start), offset + start)
            except OSError as error:
                message = f"{self.folder}: {way.doing} {self._what} failed"
                raise transfer_error(error, message) from error
            if start + count <= done:
                raise StorageError(f"{self.folder}: {way.doing} {self._what} came to an early end")
            done = start + count


def _async_io() -> AsyncIO | None:
    """None where the system has none for it: runs are moved one after the other then."""
    try:
        return AsyncIO()
    except OSError:
        return None


def _from(buffers: Sequence[memoryview], start: int) -> list[memoryview]:
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
    if num_bytes > shutil.disk_usage(folder).free:
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
        f"{format_bytes(shutil.disk_usage(folder).free)} are free there ({error.strerror}); "
        "name a folder with more room, or plan with a smaller disk budget"
    )
