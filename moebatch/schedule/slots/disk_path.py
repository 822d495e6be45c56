"""How experts come to the level that computes: straight, or from disk through main memory."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from moebatch.schedule.slots.expert_load import ExpertKey, Load
from moebatch.schedule.slots.slots import SlotQueue


class DiskPath(Protocol):
    """What has to be done below for experts that are wanted above. To be used with the lock held
    that guards all slots."""

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Likely experts have been prefetched above."""

    def fetch(self, keys: Iterable[ExpertKey]) -> None:
        """Experts are to come as far as main memory, but for those that are up already."""

    def require(self, key: ExpertKey) -> None:
        """An expert is certain to be computed."""

    def hurry(self, waiting: Sequence[ExpertKey]) -> None:
        """The driver waits for the first one of these to be up."""

    def can_be_sent(self, load: Load) -> bool:
        """Whether the next chunk of an expert can go up."""

    def sending(self, load: Load) -> None:
        """A chunk of an expert goes up."""

    def sent(self, load: Load) -> None:
        """A chunk has gone up."""


class Straight:
    """From where they live: nothing has to be done below."""

    def prefetch(self, keys: Iterable[ExpertKey]) -> None: ...

    def fetch(self, keys: Iterable[ExpertKey]) -> None: ...

    def require(self, key: ExpertKey) -> None: ...

    def hurry(self, waiting: Sequence[ExpertKey]) -> None: ...

    def can_be_sent(self, load: Load) -> bool:
        """Always."""
        return True

    def sending(self, load: Load) -> None: ...

    def sent(self, load: Load) -> None: ...


class ThroughMemory:
    """From disk, through slots of main memory. What goes up stays below until it has."""

    def __init__(self, below: SlotQueue, above: SlotQueue) -> None:
        """Whatever leaves `above` while it comes may leave `below`, too."""
        self._below = below
        self._above = above
        self._keys: set[ExpertKey] = set()
        above.tell_evictions(self._not_needed)

    # --- what is wanted -------------------------------------------------------------------------

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Likely experts: those that are still to come go up through here."""
        self._below.prefetch(key for key in keys if self._above.is_missing(key))

    def fetch(self, keys: Iterable[ExpertKey]) -> None:
        """Experts that are to come as far as main memory, but for those that are up already."""
        self._below.prefetch(key for key in keys if not self._above.is_ready(key))

    def require(self, key: ExpertKey) -> None:
        """An expert that is certain to be computed. What goes up already stays until it has; a
        claim beyond that would never end."""
        if not self._above.is_ready(key) and key not in self._keys:
            self._below.require(key)

    def hurry(self, waiting: Sequence[ExpertKey]) -> None:
        """One of those that are waited for comes first, and stays until it can go up."""
        missing = [key for key in waiting if self._above.is_missing(key)]
        here = [key for key in missing if self._below.is_ready(key)]
        for key in (here or missing)[:1]:
            self.require(key)
            self._below.hurry(key)

    # --- what moves -----------------------------------------------------------------------------

    def can_be_sent(self, load: Load) -> bool:
        """Whether the next chunk of an expert can go up: it has come from disk."""
        return self._below.is_ready(load.key)

    def sending(self, load: Load) -> None:
        """A chunk of an expert goes up: below, it must stay until the last one has."""
        if load.key not in self._keys:
            self._keys.add(load.key)
            self._below.use(load.key)

    def sent(self, load: Load) -> None:
        """A chunk has gone up."""
        if load.is_ready:
            self._not_needed(load.key)

    def _not_needed(self, key: ExpertKey) -> None:
        """An expert has gone up, or has been given up on its way."""
        if key in self._keys:
            self._keys.remove(key)
            self._below.finish(key, keep=False)
