"""Experts on their way to the level that computes: chunk by chunk over a link, from where they
live straight or from disk through main memory."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from moebatch.schedule.slots.expert_load import Chunk, ExpertKey, Load
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.task import Kind, Task


class DiskPath:
    """What has to be done below for experts that are wanted above: nothing, where they come
    straight from where they live. To be used with the lock held that guards all slots."""

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Likely experts have been prefetched above."""

    def fetch(self, keys: Iterable[ExpertKey]) -> None:
        """Experts are to come as far as main memory, but for those that are up already."""

    def require(self, key: ExpertKey) -> None:
        """An expert is certain to be computed."""

    def hurry(self, waiting: Collection[ExpertKey]) -> None:
        """The driver waits for the first one of these to be up."""

    def can_be_sent(self, load: Load) -> bool:
        """Whether the next chunk of an expert can go up."""
        return True

    def sending(self, load: Load) -> None:
        """A chunk of an expert goes up."""

    def sent(self, load: Load) -> None:
        """A chunk has gone up."""


class ThroughMemory(DiskPath):
    """From disk, through slots of main memory. What goes up stays below until it has."""

    def __init__(self, below: SlotQueue, above: SlotQueue) -> None:
        """Whatever leaves `above` while it comes may leave `below`, too."""
        self._below = below
        self._above = above
        self._keys: set[ExpertKey] = set()
        above.on_evict = self._not_needed

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Likely experts: those that are still to come go up through here."""
        self._below.prefetch(key for key in keys if self._above.is_missing(key))

    def fetch(self, keys: Iterable[ExpertKey]) -> None:
        self._below.prefetch(key for key in keys if not self._above.is_ready(key))

    def require(self, key: ExpertKey) -> None:
        """An expert that is certain to be computed. What goes up already stays until it has; a
        claim beyond that would never end."""
        if not self._above.is_ready(key) and key not in self._keys:
            self._below.require(key)

    def hurry(self, waiting: Collection[ExpertKey]) -> None:
        """One of those that are waited for comes first, and stays until it can go up."""
        missing = filter(self._above.is_missing, waiting)  # no further than need be
        first = next(missing, None)
        if first is not None:
            key = next(filter(self._below.is_ready, chain([first], missing)), first)
            self.require(key)
            self._below.hurry(key)

    def can_be_sent(self, load: Load) -> bool:
        return self._below.is_ready(load.key)

    def sending(self, load: Load) -> None:
        """A chunk of an expert goes up: below, it must stay until the last one has."""
        if load.key not in self._keys:
            self._keys.add(load.key)
            self._below.use(load.key)

    def sent(self, load: Load) -> None:
        if load.is_ready:
            self._not_needed(load.key)

    def _not_needed(self, key: ExpertKey) -> None:
        """An expert has gone up, or has been given up on its way."""
        if key in self._keys:
            self._keys.remove(key)
            self._below.finish(key, keep=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStream:
    """What a link brings into the slots of the level above it, when no launched task can start.

    All of it is called with the lock held that guards the slots.
    """

    slots: SlotQueue
    kind: Kind = Kind.CHUNK
    step_of: Callable[[int], int] = lambda layer: layer
    """The step for which experts of a layer are moved now."""
    path: Callable[[], DiskPath] = DiskPath
    """What has to be done at the level from which they come."""

    def next_chunk(self) -> Chunk | None:
        """The most urgent chunk; it counts as on its way from now on."""
        path = self.path()
        chunk = self.slots.next_chunk(path.can_be_sent)
        if chunk is not None:
            path.sending(chunk.load)
        return chunk

    def task_of(self, chunk: Chunk) -> Task:
        key = chunk.load.key
        return Task(self.kind, self.step_of(key.layer), expert=key.expert, part=chunk.number)

    def moved(self, chunk: Chunk) -> None:
        self.slots.finish_chunk(chunk)
        self.path().sent(chunk.load)

    def lost(self, chunk: Chunk) -> None:
        """It could not be moved."""
        self.slots.lose_chunk(chunk)
