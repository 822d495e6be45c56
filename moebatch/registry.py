"""Things that are known by name, to which a program that uses this one may add its own."""

from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """Entries by name, in the order in which they were registered."""

    def register(self, name: str, entry: T) -> None:
        """Adds an entry for as long as the program runs. Raises ValueError for a name in use."""
        if name in self:
            raise ValueError(f"{name} is registered already")
        self[name] = entry
