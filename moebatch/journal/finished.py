"""What all journals of a job say together."""

import os
import resource
import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from moebatch.errors import StorageError
from moebatch.journal.record import STATES, Record, State, decode, line_of
from moebatch.journal.writer import SUFFIX

_BUFFER_BYTES = 2**20
_MOST_OPEN = 256


class Found(NamedTuple):
    """Where the best record of a row is."""

    place: int
    name: int
    state: State


class Finished:
    """The union of journals: of several records of a row success beats all others, and then the
    newest counts: what was begun of a row that had failed is gone on with. Half a record at the end
    of a journal, and one that was damaged, are left out.

    Takes 41 bytes of memory per record; lines are read again when they are asked for.
    """

    def __init__(self, folder: Path) -> None:
        """Reads all journals of a folder, which need not exist. Raises StorageError."""
        self.num_damaged = 0
        """Records that were left out, torn ends not counted."""
        self._paths = journals(folder)
        self._open: dict[int, int] = {}
        """Descriptors by journal, the one that was used last at the end. A job of many shards has
        more journals than a process may have open."""
        self._most_open = _most_open()
        self._heads, self._tails, self._names = array("Q"), array("Q"), array("Q")
        self._files, self._offsets, self._lengths = array("I"), array("q"), array("I")
        self._states = array("B")
        for number, path in enumerate(self._paths):
            self._read(number, path)
        self._sort()

    def __len__(self) -> int:
        """Rows of which something is known."""
        return len(self._heads)

    def find(self, key: bytes) -> Found | None:
        """The best record of the row with this key."""
        head, tail = int.from_bytes(key[:8]), int.from_bytes(key[8:])
        place = bisect_left(self._heads, head)
        while place < len(self._heads) and self._heads[place] == head:
            if self._tails[place] == tail:
                return Found(place, self._names[place], STATES[self._states[place]])
            place += 1
        return None

    def line(self, place: int) -> bytes:
        """The line of the record in a place. Raises StorageError if it cannot be read any more."""
        number = self._files[place]
        path = self._paths[number]
        try:
            data = _bytes_at(self._opened(number), self._lengths[place], self._offsets[place])
        except OSError as error:
            raise StorageError(f"{path}: reading failed: {error.strerror}") from error
        if decode(data) is None:
            raise StorageError(f"{path}: byte {self._offsets[place]} was changed while it was used")
        return line_of(data)

    def _opened(self, number: int) -> int:
        descriptor = self._open.pop(number, None)
        if descriptor is None:
            while len(self._open) >= self._most_open:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = os.open(self._paths[number], os.O_RDONLY)
        self._open[number] = descriptor
        return descriptor

    def close(self) -> None:
        """Gives files back."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _read(self, number: int, path: Path) -> None:
        for offset, length, record in records(path):
            if record is None:
                self.num_damaged += 1
                continue
            self._heads.append(int.from_bytes(record.key[:8]))
            self._tails.append(int.from_bytes(record.key[8:]))
            self._names.append(record.name)
            self._files.append(number)
            self._offsets.append(offset)
            self._lengths.append(length)
            self._states.append(STATES.index(record.state))

    def _sort(self) -> None:
        """Leaves the best record of each row, ordered by key."""
        heads, tails, states = (
            np.frombuffer(column, dtype=column.typecode)
            for column in (self._heads, self._tails, self._states)
        )
        # Stable, so that of equally good ones the newest is last.
        order = np.lexsort((states == STATES.index("done"), tails, heads))
        heads, tails = heads[order], tails[order]
        is_last = np.ones(len(order), dtype=bool)
        is_last[:-1] = (heads[1:] != heads[:-1]) | (tails[1:] != tails[:-1])
        kept = order[is_last]
        for name in ("_heads", "_tails", "_names", "_files", "_offsets", "_lengths", "_states"):
            column = getattr(self, name)
            chosen = array(column.typecode)
            chosen.frombytes(np.frombuffer(column, dtype=column.typecode)[kept].tobytes())
            setattr(self, name, chosen)


def _most_open() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MOST_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, allowed // 2))
    )


def _bytes_at(descriptor: int, length: int, offset: int) -> bytes:
    """All of them, as far as the file goes: the system may give fewer at a time."""
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def journals(folder: Path) -> list[Path]:
    """Journals of a folder, oldest first. Raises StorageError."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder}: reading failed: {error.strerror}") from error


def records(path: Path) -> Iterator[tuple[int, int, Record | None]]:
    """Offset, length and content of every line; None for damaged ones. What is written while it is
    read may come or not. Raises StorageError."""
    offset = 0
    try:
        # A pipe of that name would otherwise be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=_BUFFER_BYTES) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StorageError(f"{path}: is no regular file")
            for data in file:
                if data.endswith(b"\n"):
                    yield offset, len(data), decode(data)
                offset += len(data)
    except OSError as error:
        raise StorageError(f"{path}: reading failed: {error.strerror}") from error
