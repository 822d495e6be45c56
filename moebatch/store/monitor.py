"""One lock for many threads, of which only those are woken that can go on."""

import threading
from _thread import RLock
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")
_STRETCH_S = 0.5
"""Longest wait in one go. Signals are handled in the main thread alone, and one that comes just
before a wait, or to another thread, when that is over."""


class End:
    """Found by who need not wait for anything any more."""


class Monitor(RLock):  # type: ignore[misc]
    """A lock, and threads that sleep until what they wait for has come about.

    A thread that changes something, with the lock held, says so; what sleepers wait for is looked
    at there and then, by the same thread. With a dozen threads of which each waits for something
    else, waking all of them to look for themselves costs more than most changes: one can run at a
    time.

    The methods of the lock are those of C: what the handler of a signal raises comes before them or
    after them, and the lock is given back in either case. Else the threads that are to end by that
    would wait for it.
    """

    def __init__(self) -> None:
        self._sleepers: list[_Sleeper[object]] = []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Sleeps until `condition` holds. Called with the lock held, as `condition` is, by any
        thread."""
        while not condition():
            self._sleep(_Sleeper(lambda: condition() or None, self))

    def take(self, find: Callable[[], Found | None], *, alike: object = None) -> Found:
        """Sleeps until `find` finds something, and returns it. Called with the lock held, as `find`
        is, by any thread; what it finds is taken with that.

        Sleepers that are `alike` look for the same: where one finds nothing, the others are not
        asked."""
        found = find()
        if found is not None:
            return found
        sleeper = _Sleeper(find, self, alike)
        self._sleep(sleeper)
        assert sleeper.found is not None, "nothing else ends its sleep"
        return sleeper.found

    def changed(self) -> None:
        """Wakes those that can go on now. Called with the lock held."""
        in_vain: list[object] = []
        for sleeper in self._sleepers[:]:
            if sleeper.alike not in in_vain:
                sleeper.look()
                if sleeper.alike is not None and not sleeper.is_over():
                    in_vain.append(sleeper.alike)

    def _sleep(self, sleeper: "_Sleeper[Found]") -> None:
        """Until it is woken. Raises what looking for it has raised."""
        self._sleepers.append(sleeper)  # type: ignore[arg-type]
        try:
            while not sleeper.woken.wait_for(sleeper.is_over, _STRETCH_S):
                pass
        finally:
            self._sleepers.remove(sleeper)  # type: ignore[arg-type]
        if sleeper.error is not None:
            raise sleeper.error


class _Sleeper(Generic[Found]):
    """A thread that waits for something."""

    def __init__(self, find: Callable[[], Found | None], lock: RLock, alike: object = None) -> None:
        self.alike = alike
        self.woken = threading.Condition(lock)
        self.found: Found | None = None
        self.error: BaseException | None = None
        self._find = find

    def is_over(self) -> bool:
        """Whether it need not sleep any longer."""
        return self.error is not None or self.found is not None

    def look(self) -> None:
        """Wakes it if what it waits for is there. What goes wrong is its own business."""
        if self.is_over():
            return
        try:
            self.found = self._find()
        except BaseException as error:
            self.error = error
        if self.is_over():
            self.woken.notify()
