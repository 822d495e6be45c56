"""A hard limit on the memory of a command, page cache included: a cgroup of its own.

As root a cgroup is made by hand, in version 2 or version 1; otherwise systemd is asked for a scope.
"""

import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_V1 = _ROOT / "memory"


class MemoryCap(ABC):
    """Runs commands under a limit."""

    @abstractmethod
    def wrapped(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` under the limit."""

    @property
    def peak_bytes(self) -> int | None:
        """Most memory, page cache included, since the cap was made; None if nobody counts."""
        return None

    @property
    def in_words(self) -> str:
        """How the limit is enforced."""
        return "no memory cap: this system lets us make no cgroup"


class NoCap(MemoryCap):
    """Nothing is enforced."""

    def wrapped(self, command: Sequence[str]) -> list[str]:
        return list(command)


class CgroupCap(MemoryCap):
    """A cgroup made by hand."""

    def __init__(self, folder: Path, peak: str, limit_bytes: int) -> None:
        self._folder = folder
        self._peak = peak
        self._limit_bytes = limit_bytes

    def wrapped(self, command: Sequence[str]) -> list[str]:
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self._folder / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int | None:
        try:
            return int((self._folder / self._peak).read_text())
        except (OSError, ValueError):
            return None

    @property
    def in_words(self) -> str:
        return f"memory cgroup of {self._limit_bytes / 2**30:.3g} GiB, page cache included, no swap"


class ScopeCap(MemoryCap):
    """A transient scope of systemd."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes

    def wrapped(self, command: Sequence[str]) -> list[str]:
        return [*_scope(self._limit_bytes), *command]

    @property
    def in_words(self) -> str:
        return f"systemd scope of {self._limit_bytes / 2**30:.3g} GiB, page cache included, no swap"


@contextmanager
def memory_cap(limit_bytes: int) -> Iterator[MemoryCap]:
    """A fresh cap, the best kind that this system allows; it is removed afterwards."""
    made = _cgroup(limit_bytes)
    if made is None:
        yield ScopeCap(limit_bytes) if _has_scopes(limit_bytes) else NoCap()
        return
    folder, cap = made
    try:
        yield cap
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """A process that was killed may take some moments to leave."""
    for _ in range(20):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def _cgroup(limit_bytes: int) -> tuple[Path, MemoryCap] | None:
    version_1 = _V1.is_dir()
    folder = (_V1 if version_1 else _ROOT) / f"moebatch-bench.{os.getpid()}.{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        if version_1:
            (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            with suppress(OSError):  # only where swap is counted
                (folder / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
            return folder, CgroupCap(folder, "memory.max_usage_in_bytes", limit_bytes)
        (folder / "memory.max").write_text(str(limit_bytes))
        with suppress(OSError):
            (folder / "memory.swap.max").write_text("0")
        return folder, CgroupCap(folder, "memory.peak", limit_bytes)
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None


def _scope(limit_bytes: int) -> list[str]:
    limits = ["-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0"]
    return ["systemd-run", "--user", "--scope", "--quiet", *limits, "--"]


def _has_scopes(limit_bytes: int) -> bool:
    if shutil.which("systemd-run") is None:
        return False
    tried = subprocess.run([*_scope(limit_bytes), "true"], capture_output=True, check=False)
    return tried.returncode == 0


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Forgets what is cached of the files: pages that somebody else has cached would not count
    against the cap of who reads them next."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
