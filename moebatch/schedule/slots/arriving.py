"""Experts that a step needs, handed out as they can be computed."""

from collections.abc import Callable, Iterator, Sequence

from moebatch.schedule.slots.expert_load import ExpertKey

Take = Callable[[Sequence[ExpertKey]], ExpertKey | None]
Wait = Callable[[Sequence[ExpertKey]], None]


class Arriving:
    """Chosen experts of a step: resident, arrived, in flight, absent. Each is handed out once."""

    def __init__(self, keys: Sequence[ExpertKey], first_ready: Take, wait: Wait) -> None:
        """`first_ready` gives the one of some experts to be computed first, if any is ready;
        `wait` returns when one is."""
        self._left = list(keys)
        self._first_ready = first_ready
        self._wait = wait

    @property
    def ready(self) -> Iterator[int]:
        """Those that have arrived already."""
        while self._left and (key := self._first_ready(self._left)) is not None:
            self._left.remove(key)
            yield key.expert

    def __iter__(self) -> Iterator[int]:
        """All that are left, those that are ready first."""
        yield from self.ready
        while self._left:
            self._wait(self._left)
            yield from self.ready
