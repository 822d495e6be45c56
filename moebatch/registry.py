"""Things that are known by name, to which a program that uses this one may add its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries by name, in the order in which they were registered."""

    def __init__(self, entries: Mapping[str, T]) -> None:
        self._entries = dict(entries)

    def register(self, name: str, entry: T) -> None:
        """Adds an entry for as long as the program runs. Raises ValueError for a name in use."""
        if name in self._entries:
            raise ValueError(f"{name} is registered already")
        self._entries[name] = entry

    @contextmanager
    def including(self, name: str, entry: T) -> Iterator[None]:
        """The same for the length of a `with` block."""
        self.register(name, entry)
        try:
            yield
        finally:
            del self._entries[name]

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
