"""How fast experts come from disk, through the store, and how fast a file is written."""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from moebatch.errors import ConfigError, Fault, StorageError
from moebatch.measure.sizes import DiskSizes
from moebatch.store.checkpoint import Extent
from moebatch.store.experts import ExpertKey, ExpertStore
from moebatch.store.memory import Arena
from moebatch.store.record import PIECE_BYTES, Record

_EXTENTS_OF_CHUNK = 4
_SHARE_OF_FREE_DISK = 0.25
_WAY_OUT = "give another folder, or a file to read"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """Bytes per second of many chunks of a few hundred megabytes: disks drift."""

    rates: tuple[float, ...]
    is_direct: bool
    """Whether the page cache was bypassed; what is read through it may be in memory already."""

    @property
    def median(self) -> float:
        """What to plan with."""
        return median(self.rates)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest chunk."""
        return min(self.rates), max(self.rates)


def read_rates(paths: Sequence[Path], sizes: DiskSizes) -> DiskRates:
    """Reads the files again and again, as the engine reads experts, for ``sizes.read_s``.

    Raises ConfigError when they are too short to tell anything, StorageError when reading fails.
    """
    extents = _extents(paths, sizes.extent_bytes)
    if not extents:
        needed = f"give a file of {sizes.extent_bytes // 2**20} MiB or more, or a folder with one"
        raise ConfigError([Fault(file=str(paths[0]), message=f"too short to time; {needed}")])
    # Two layers at least, so that one is announced while the other is read.
    num_layers = max(2, len(extents) // _EXTENTS_OF_CHUNK)
    records = {
        ExpertKey(layer, expert): Record.of([extent])
        for (layer, expert), extent in zip(
            itertools.product(range(num_layers), range(_EXTENTS_OF_CHUNK)),
            itertools.cycle(extents),
            strict=False,
        )
    }
    store = ExpertStore(records, num_slots=sizes.num_slots, num_readers=sizes.num_readers)
    with closing(store):
        rates = tuple(_chunk_rates(store, num_layers, sizes.read_s))
        return DiskRates(rates=rates, is_direct=store.reads_past_page_cache)


def files_to_read(path: Path) -> list[Path]:
    """The file itself, or those of a folder, large ones first.

    Raises ConfigError when there is none.
    """
    if path.is_file():
        return [path]
    found = [file for file in path.glob("*") if file.is_file()] if path.is_dir() else []
    if not found:
        message = "no such file, and no folder with files; give something large to read"
        raise ConfigError([Fault(file=str(path), message=message)])
    return sorted(found, key=lambda file: (-file.stat().st_size, file.name))


@contextmanager
def scratch_file(folder: Path, sizes: DiskSizes) -> Iterator[tuple[Path, float]]:
    """A file of random data, and the bytes per second at which it reached the disk; it is removed
    afterwards, whatever happens. It is shorter than ``sizes.file_bytes`` where the disk is short.

    Raises StorageError when the folder cannot be written or has no room.
    """
    path, num_pieces = _new_file(folder, sizes)
    try:
        yield path, _write(path, num_pieces)
    finally:
        path.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below `folder`. Raises StorageError."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; give a folder that exists") from error
    return status.f_bavail * status.f_frsize


def _new_file(folder: Path, sizes: DiskSizes) -> tuple[Path, int]:
    """An empty file, and how many pieces to write into it."""
    room = int(free_bytes(folder) * _SHARE_OF_FREE_DISK)
    if room < sizes.extent_bytes:
        raise StorageError(f"{folder}: too little room for a file of random data; {_WAY_OUT}")
    try:
        fd, name = tempfile.mkstemp(prefix=".moebatch-profile-", dir=folder)
        os.close(fd)
    except OSError as error:
        message = f"{folder}: cannot be written: {error.strerror}; {_WAY_OUT}"
        raise StorageError(message) from error
    return Path(name), -(-min(sizes.file_bytes, room) // PIECE_BYTES)


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


def _chunk_rates(store: ExpertStore, num_layers: int, read_s: float) -> Iterator[float]:
    """Bytes per second of one layer after the other; the first ones fill empty slots."""
    deadline = time.perf_counter() + read_s
    experts = range(_EXTENTS_OF_CHUNK)
    before = time.perf_counter()
    for number in itertools.count():
        layer, following = number % num_layers, (number + 1) % num_layers
        ready = store.require(layer, experts)
        store.announce(ExpertKey(following, expert) for expert in experts)
        num_bytes = sum(tensor.nbytes for _, tensors in ready for tensor in tensors)
        now = time.perf_counter()
        yield num_bytes / (now - before)
        before = now
        if now >= deadline:
            return


def _write(path: Path, num_pieces: int) -> float:
    """Bytes per second with which so many pieces reach the disk."""
    arena = Arena(PIECE_BYTES)
    data = arena.view(0, PIECE_BYTES)
    data[:] = os.urandom(PIECE_BYTES)
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
        raise StorageError(f"{path.parent}: cannot be written: {error.strerror}") from error


def _open_to_write(path: Path) -> int:
    """Past the page cache where the system allows it."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, os.O_WRONLY)
