"""A file system of which one operation goes wrong."""

import errno
from pathlib import Path

from moebatch.journal.files import Files


class FaultyFiles(Files):
    """The k-th operation fails, or a write of it comes short before the next one fails."""

    def __init__(self, fails_at: int, *, number: int = errno.EIO, is_short: bool = False) -> None:
        self.num_operations = 0
        self._fails_at = fails_at
        self._number = number
        self._is_short = is_short

    def _count(self) -> None:
        self.num_operations += 1
        if self.num_operations == self._fails_at:
            raise OSError(self._number, "as the test wants it")

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, descriptor: int, data: bytes) -> int:
        if self._is_short and self.num_operations + 2 == self._fails_at and len(data) > 1:
            self._count()
            return super().write(descriptor, data[: len(data) // 2])
        self._count()
        return super().write(descriptor, data)

    def cut(self, descriptor: int, num_bytes: int) -> None:
        self._count()
        super().cut(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        self._count()
        super().sync(descriptor)

    def require_there(self, descriptor: int, path: Path) -> None:
        self._count()
        super().require_there(descriptor, path)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)

    def sync_folder(self, path: Path) -> None:
        self._count()
        super().sync_folder(path)


class Noted(Files):
    """Notes what is asked of it, and of which file."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def create(self, path: Path) -> int:
        self.asked.append("create")
        return super().create(path)

    def sync(self, descriptor: int) -> None:
        self.asked.append("sync")
        super().sync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        self.asked.append("replace")
        super().replace(source, target)

    def sync_folder(self, path: Path) -> None:
        self.asked.append(f"sync {path.name}")
        super().sync_folder(path)
