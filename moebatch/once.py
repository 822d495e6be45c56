"""What follows from what does not change, worked out when it is first asked for."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:  # in the place of Python's own
        """Python's own without the lock that it takes before 3.12, which is half of the time that
        plans take to look up what is quickly worked out. Threads may work out the same twice."""

        def __init__(self, work_out: Callable[[Any], Any]) -> None:
            self.func = work_out
            self.__doc__ = work_out.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                return self
            found = instance.__dict__[self._name] = self.func(instance)
            return found


def once(known: dict[Key, Found], key: Key, work_out: Callable[[], Found]) -> Found:
    """What is known by that key, and from now on is."""
    found = known.get(key)
    if found is None:
        found = known[key] = work_out()
    return found


__all__ = ["cached_property", "once"]
