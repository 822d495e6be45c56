"""How fast experts come from disk, through the store, and how fast a file is written."""

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES
from moebatch.checkpoint.header import Extent
from moebatch.checkpoint.record import PIECE_BYTES, Record
from moebatch.engine.lanes.read_ahead import ReadAhead
from moebatch.errors import ConfigError, StorageError
from moebatch.measure.sizes import DiskSizes
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.memory import Arena
from moebatch.store.scratch_file import LayerPages, PageRuns, ScratchFile

_EXTENTS_OF_CHUNK = 4
_SHARE_OF_FREE_DISK = 0.25
_PAGES = 512
_WAY_OUT = "give another folder, or a file to read"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Bytes per second of many chunks of a few hundred megabytes: disks drift."""

    rates: tuple[float, ...]
    is_direct: bool
    """Whether the page cache was bypassed; what is read through it may be in memory already."""

    @property
    def mean(self) -> float:
        """What to plan with: all chunks over all of their time. A disk that is slow half of the
        time takes two thirds of it for that half."""
        return harmonic_mean(self.rates)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest chunk."""
        return min(self.rates), max(self.rates)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageTimes:
    """Seconds that a page which lies alone takes to read, and to write, among others."""

    read_s: float
    write_s: float


class ExpertStream:
    """Extents of files as experts, one after the other for ever, read ahead as in a job."""

    def __init__(self, paths: Sequence[Path], extent_bytes: int, sizes: DiskSizes) -> None:
        """Raises ConfigError when the files are too short to tell anything."""
        extents = _extents(paths, extent_bytes)
        if not extents:
            needed = f"give a file of {extent_bytes // 2**20} MiB or more, or a folder with one"
            raise ConfigError.at(paths[0], f"too short to time; {needed}")
        # Two layers at least, so that one is prefetched while the other is read.
        self._num_layers = max(2, len(extents) // _EXTENTS_OF_CHUNK)
        places = itertools.product(range(self._num_layers), range(_EXTENTS_OF_CHUNK))
        records = {
            ExpertKey(layer, expert): Record.of([extent])
            for (layer, expert), extent in zip(places, itertools.cycle(extents), strict=False)
        }
        self._chunk_bytes = _EXTENTS_OF_CHUNK * extent_bytes
        self._store = ExpertStore(records, num_slots=sizes.num_slots)
        self._reading = ReadAhead(self._store, num_readers=sizes.num_readers)
        self._rates: list[float] = []

    def experts(self) -> Iterator[Tensor]:
        """The bytes of each, valid until the next is asked for. Raises StorageError."""
        experts, before = range(_EXTENTS_OF_CHUNK), self._progress()
        for number in itertools.count():
            layer, following = number % self._num_layers, (number + 1) % self._num_layers
            ready = self._reading.require(layer, experts)
            self._reading.prefetch(ExpertKey(following, expert) for expert in experts)
            with closing(ready):
                for _, (tensor,) in ready:
                    yield tensor
            now = self._progress()
            # While other programs hold this thread up, its readers get ahead of it: a chunk that
            # was there already has no time of its own, and counts with the next.
            if now[0] - before[0] >= self._chunk_bytes and now[1] > before[1]:
                self._rates.append((now[0] - before[0]) / (now[1] - before[1]))
                before = now

    @property
    def rates(self) -> DiskRates:
        """Of the chunks that were read so far, over the time in which reads were in flight."""
        return DiskRates(rates=tuple(self._rates), is_direct=self._store.is_direct)

    def close(self) -> None:
        """Stops reading."""
        self._reading.close()
        self._store.close()

    def _progress(self) -> tuple[int, float]:
        """Bytes read, and seconds in which reads were in flight."""
        statistics = self._reading.statistics
        return statistics.num_bytes, statistics.busy.total_s


def read_rates(paths: Sequence[Path], sizes: DiskSizes) -> DiskRates:
    """Reads the files again and again, as the engine reads experts, for ``sizes.read_s``.

    Raises ConfigError when they are too short to tell anything, StorageError when reading fails.
    """
    deadline = time.perf_counter() + sizes.read_s
    return _read_until(lambda: time.perf_counter() >= deadline, paths, sizes)


@contextmanager
def reading_beside(paths: Sequence[Path], sizes: DiskSizes, rates: list[float]) -> Iterator[None]:
    """Reads the files as `read_rates` does, in a thread of its own, while the block runs, and adds
    the rates of its chunks to `rates`."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_read_until, over.is_set, paths, sizes)
        try:
            yield
        finally:
            over.set()
    rates += reading.result().rates


def _read_until(is_over: Callable[[], bool], paths: Sequence[Path], sizes: DiskSizes) -> DiskRates:
    """Of one chunk at least."""
    with closing(ExpertStream(paths, sizes.extent_bytes, sizes)) as stream:
        for _ in stream.experts():
            if is_over() and stream.rates.rates:
                break
        return stream.rates


def page_times(folder: Path) -> PageTimes:
    """Reads and writes pages here and there, as those of keys and values on disk are. They are so
    small that their bytes take next to nothing. Raises StorageError."""
    pages = Arena(_PAGES * PAGE_BYTES).bytes[: _PAGES * PAGE_BYTES].view(_PAGES, PAGE_BYTES)
    order = np.random.default_rng(0).permutation(_PAGES)
    runs = PageRuns(order, np.ones_like(order), order)
    with closing(ScratchFile(folder, [LayerPages(_PAGES, (PAGE_BYTES,))])) as file:
        start = time.perf_counter()
        file.write(0, runs, [pages])
        written = time.perf_counter()
        file.read(0, runs, [pages])
        read = time.perf_counter()
    return PageTimes(read_s=(read - written) / _PAGES, write_s=(written - start) / _PAGES)


def files_to_read(path: Path) -> list[Path]:
    """The file itself, or those of a folder, large ones first.

    Raises ConfigError when there is none.
    """
    if path.is_file():
        return [path]
    found = [file for file in path.glob("*") if file.is_file()] if path.is_dir() else []
    if not found:
        message = "no such file, and no folder with files; give something large to read"
        raise ConfigError.at(path, message)
    return sorted(found, key=lambda file: (-file.stat().st_size, file.name))


@contextmanager
def scratch_file(folder: Path, sizes: DiskSizes) -> Iterator[tuple[Path, float]]:
    """A file of random data, and the bytes per second at which it reached the disk. It is shorter
    than ``sizes.file_bytes`` where the disk is short.

    The file has no name in the folder, so nothing is left of it however the process ends.

    Raises StorageError when the folder cannot be written or has no room.
    """
    fd, num_pieces = _new_file(folder, sizes)
    path = Path(f"/proc/self/fd/{fd}")
    try:
        yield path, _write(path, folder, num_pieces)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below `folder`. Raises StorageError."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; give a folder that exists") from error


def _new_file(folder: Path, sizes: DiskSizes) -> tuple[int, int]:
    """A descriptor of an empty file without a name, and how many pieces to write into it."""
    room = int(free_bytes(folder) * _SHARE_OF_FREE_DISK)
    if room < sizes.extent_bytes:
        raise StorageError(f"{folder}: too little room for a file of random data; {_WAY_OUT}")
    try:
        fd, name = tempfile.mkstemp(prefix=".moebatch-profile-", dir=folder)
        Path(name).unlink()
    except OSError as error:
        message = f"{folder}: cannot be written: {error.strerror}; {_WAY_OUT}"
        raise StorageError(message) from error
    return fd, -(-min(sizes.file_bytes, room) // PIECE_BYTES)


def _extents(paths: Sequence[Path], extent_bytes: int) -> list[Extent]:
    """Ranges of the files, posing as tensors."""
    return [
        Extent(
            path=path,
            offset=offset,
            num_bytes=extent_bytes,
            dtype="BF16",
            shape=(extent_bytes // 2,),
        )
        for path in paths
        for offset in range(0, path.stat().st_size - extent_bytes + 1, extent_bytes)
    ]


def _write(path: Path, folder: Path, num_pieces: int) -> float:
    """Bytes per second with which so many pieces reach the disk of the folder."""
    arena = Arena(PIECE_BYTES)
    data = arena.view(0, PIECE_BYTES)
    # Noise that is of use as weights in any format: no zeros, nothing that is not a number.
    data[:] = _noise(PIECE_BYTES)
    try:
        fd = _open_to_write(path)
        try:
            start = time.perf_counter()
            for _ in range(num_pieces):
                done = 0
                while done < PIECE_BYTES:
                    done += os.write(fd, data[done:])
            os.fsync(fd)
            return num_pieces * PIECE_BYTES / (time.perf_counter() - start)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error


def _noise(num_bytes: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(num_bytes // 2, generator=generator).to(torch.bfloat16)
    return numbers.view(torch.uint8).numpy()


def _open_to_write(path: Path) -> int:
    """Past the page cache where the system allows it."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, os.O_WRONLY)
