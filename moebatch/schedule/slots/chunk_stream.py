"""Experts on their way over one link, chunk by chunk."""

from collections.abc import Callable
from dataclasses import dataclass

from moebatch.schedule.slots.disk_path import DiskPath, Straight
from moebatch.schedule.slots.expert_load import Chunk
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.task import Kind, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStream:
    """What a link brings into the slots of the level above it, when no launched task can start.

    All of it is called with the lock held that guards the slots.
    """

    slots: SlotQueue
    kind: Kind = Kind.CHUNK
    step_of: Callable[[int], int] = lambda layer: layer
    """The step for which experts of a layer are moved now."""
    path: Callable[[], DiskPath] = Straight
    """What has to be done at the level from which they come."""

    def next_chunk(self) -> Chunk | None:
        """The most urgent chunk; it counts as on its way from now on."""
        path = self.path()
        chunk = self.slots.next_chunk(path.can_be_sent)
        if chunk is not None:
            path.sending(chunk.load)
        return chunk

    def task_of(self, chunk: Chunk) -> Task:
        """The chunk as a task of the timeline."""
        key = chunk.load.key
        return Task(self.kind, self.step_of(key.layer), expert=key.expert, part=chunk.number)

    def moved(self, chunk: Chunk) -> None:
        """It has arrived."""
        self.slots.finish_chunk(chunk)
        self.path().sent(chunk.load)

    def lost(self, chunk: Chunk) -> None:
        """It could not be moved."""
        self.slots.lose_chunk(chunk)
