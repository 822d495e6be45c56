"""The operating system with one operation on files that goes wrong."""

import builtins
import errno
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Way = Literal["fails", "is full", "is short", "is torn", "is late"]
"""fails: with an error, nothing done. is full: the same, as on a full disk. is short: half of it is
done, and said so. is torn: half of it is done, and an error. is late: it takes a while."""
WAYS: tuple[Way, ...] = ("fails", "is full", "is short", "is torn", "is late")
_DELAY_S = 0.05
_BY_PATH = ("open", "mkdir", "replace", "link", "unlink", "rmdir")
_BY_DESCRIPTOR = ("fsync", "ftruncate")


class FaultyOs:
    """Counts operations on files in some folders, from any thread; the k-th goes wrong."""

    def __init__(self, folders: Sequence[Path], fails_at: int, way: Way) -> None:
        self.num_operations = 0
        self.name: str | None = None
        """Of the operation that went wrong."""
        self._folders = tuple(str(folder.resolve()) for folder in folders)
        self._fails_at = fails_at
        self._way = way
        self._ours: set[int] = set()
        self._lock = threading.Lock()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While the block runs."""
        with _patched(self._patches(io.open)):
            yield

    def _patches(self, real_open: Callable[..., Any]) -> Iterator[tuple[Any, str, Any]]:
        for name in _BY_PATH:
            yield os, name, self._by_path(name, getattr(os, name))
        for name in _BY_DESCRIPTOR:
            yield os, name, self._by_descriptor(name, getattr(os, name))
        yield os, "write", self._write(os.write)
        yield os, "pread", self._pread(os.pread)
        yield os, "preadv", self._preadv(os.preadv)
        yield os, "close", self._close(os.close)
        for module in (io, builtins):
            yield module, "open", self._stream(real_open)

    def _goes_wrong(self, name: str) -> bool:
        """Counts one operation; raises OSError if this is the one that fails."""
        with self._lock:
            self.num_operations += 1
            if self.num_operations != self._fails_at:
                return False
            self.name = name
        if self._way == "is late":
            time.sleep(_DELAY_S)
        if self._way == "fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self._way == "is full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    def _tear(self) -> None:
        if self._way == "is torn":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _has(self, path: object) -> bool:
        if not isinstance(path, str | Path):
            return False
        return str(Path(path).absolute()).startswith(self._folders)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *others: Any, **options: Any) -> Any:
            if not self._has(path):
                return real(path, *others, **options)
            wrong = self._goes_wrong(name)
            result = real(path, *others, **options)
            if name == "open":
                self._ours.add(result)
            elif wrong:
                self._tear()
            return result

        return call

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *others: Any) -> Any:
            if descriptor in self._ours and self._goes_wrong(name):
                self._tear()
            return real(descriptor, *others)

        return call

    def _write(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, data: Any) -> int:
            if descriptor not in self._ours or not self._goes_wrong("write"):
                return real(descriptor, data)
            part = data if self._way == "is late" else bytes(data)[: max(1, len(data) // 2)]
            done = real(descriptor, part)
            self._tear()
            return done

        return call

    def _pread(self, real: Callable[..., bytes]) -> Callable[..., bytes]:
        def call(descriptor: int, length: int, offset: int) -> bytes:
            if descriptor not in self._ours or not self._goes_wrong("pread"):
                return real(descriptor, length, offset)
            self._tear()
            return real(descriptor, self._part(length), offset)

        return call

    def _preadv(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, buffers: Any, offset: int) -> int:
            if descriptor not in self._ours or not self._goes_wrong("preadv"):
                return real(descriptor, buffers, offset)
            self._tear()
            first = memoryview(buffers[0])
            return real(descriptor, [first[: self._part(len(first))]], offset)

        return call

    def _part(self, length: int) -> int:
        return length if self._way == "is late" else max(1, length // 2)

    def _close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            self._ours.discard(descriptor)
            real(descriptor)

        return call

    def _stream(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Files that are read, or written, as streams: reading goes wrong, too."""

        def call(path: Any, mode: str = "r", *others: Any, **options: Any) -> Any:
            if not self._has(path):
                return real(path, mode, *others, **options)
            self._goes_wrong(f"open {mode}")
            if mode != "rb":
                return real(path, mode, *others, **options)
            return io.BufferedReader(_FaultyStream(str(path), self))

        return call


class _FaultyStream(io.FileIO):
    def __init__(self, path: str, system: FaultyOs) -> None:
        super().__init__(path, "rb")
        self._system = system

    def readinto(self, buffer: Any) -> int:  # type: ignore[override]
        view = memoryview(buffer)
        if self._system._goes_wrong("read"):
            self._system._tear()
            view = view[: self._system._part(len(view))]
        return super().readinto(view)


@contextmanager
def _patched(patches: Iterator[tuple[Any, str, Any]]) -> Iterator[None]:
    made = [(module, name, getattr(module, name), new) for module, name, new in patches]
    for module, name, _, new in made:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old, _ in made:
            setattr(module, name, old)
