"""Experts in main memory, and the reads that bring them there."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from moebatch.checkpoint.record import Record, RecordFiles, num_bytes_of, slot_bytes
from moebatch.schedule.slots.cache import Cache
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.store.memory import Arena
from moebatch.store.monitor import Monitor


class StayingTensors(tuple[Tensor, ...]):
    """The tensors of an expert that stays where it is: the same object for as long, so that what is
    made of them can be kept beside them."""

    prepared: Any = None
    """What the decoder has made of them, once it has computed the expert."""


class ExpertStore:
    """Slots of main memory, and the files of the experts that go there.

    Which expert comes next, and into which slot, is the business of `slots`, by the chunks of its
    `Record`. A lane takes the next one, reads it without holding the lock, and reports its
    arrival:

        with store.monitor:
            chunk = store.slots.next_chunk()
        store.read(chunk)
        with store.monitor:
            store.slots.finish_chunk(chunk)
            store.monitor.changed()

    `monitor` guards `slots`, for every thread that looks at them.
    """

    def __init__(
        self,
        records: Mapping[ExpertKey, Record],
        *,
        num_slots: int,
        resident: Collection[ExpertKey] = (),
        cache: Cache | None = None,
        monitor: Monitor | None = None,
        pinned: bool = False,
    ) -> None:
        """`cache` keeps experts that have been computed. `monitor` may be shared with other levels;
        `pinned` slots are what a CUDA device copies from beside other work."""
        self.records = records
        self.monitor = monitor or Monitor()
        num_chunks = {key: len(record.chunks) for key, record in records.items()}
        self.slots = SlotQueue(num_chunks, num_slots=num_slots, resident=resident, cache=cache)
        self.slot_bytes = slot_bytes(records.values())
        """Memory of a slot."""
        self.num_grown = 0
        """Experts that became resident on the way, or will when they are next computed."""
        self._resident = frozenset(resident)
        self._staying: dict[int, tuple[ExpertKey, StayingTensors]] = {}
        """By slot, of residents."""
        self._num_first_slots = self.slots.num_slots
        self._arena = Arena(self._num_first_slots * self.slot_bytes, pinned=pinned)
        self.is_pinned = self._arena.is_pinned
        """Whether a device copies from it beside other work."""
        self._more: list[Arena] = []
        """Slots that were added, each with memory of its own."""
        self._files = RecordFiles(records.values())

    @property
    def is_direct(self) -> bool:
        """Whether every file is read with O_DIRECT."""
        return self._files.is_direct

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self._arena.num_bytes + sum(arena.num_bytes for arena in self._more)

    @property
    def has_residents(self) -> bool:
        """Whether all residents have been read; called with the lock held."""
        return all(map(self.slots.is_ready, self._resident))

    @property
    def can_grow(self) -> bool:
        """Whether there are experts that come and go, in memory that need not be pinned."""
        with self.monitor:
            return self.slots.can_grow and not self.is_pinned

    def grow(self) -> None:
        """Takes memory for one expert more, `slot_bytes`: one that is computed from now on stays.

        Raises OSError or MemoryError when the system refuses memory.
        """
        assert not self.is_pinned, "memory that a device copies from does not grow"
        arena = Arena(self.slot_bytes)
        with self.monitor:
            self._more.append(arena)
            slot = self.slots.grow()
            assert slot == self._num_first_slots + len(self._more) - 1, "one adds slots"
            self.num_grown += 1
            self.monitor.changed()

    def read(self, chunk: Chunk) -> None:
        """Reads a chunk of an expert into its slot; for several threads at once.

        Raises StorageError, and OutOfMemory when the system refuses memory: smaller passes would
        not help, as what is read must be read.
        """
        record = self.records[chunk.load.key]
        arena, start = self._place(chunk.slot)
        for piece in record.chunks[chunk.number]:
            target = arena.view(start + piece.buffer_offset, piece.num_bytes)
            self._files.read(piece, target)
            record.convert(piece, arena, start)

    def chunk_bytes(self, key: ExpertKey, number: int) -> int:
        """What `read` reads of a chunk."""
        return num_bytes_of(self.records[key].chunks[number])

    def tensors(self, key: ExpertKey) -> tuple[Tensor, ...]:
        """The tensors of an expert that is there, valid as long as it is in use; no copies. Those
        of residents are the same object each time."""
        slot = self._slot(key)
        owner, staying = self._staying.get(slot, (None, None))
        if staying is not None and owner == key:
            return staying
        tensors = self.records[key].tensors(*self._place(slot))
        if key not in self._resident:
            return tensors
        staying = StayingTensors(tensors)
        self._staying[slot] = key, staying
        return staying

    def tensor_bytes(self, key: ExpertKey) -> tuple[Tensor, ...]:
        """The same as bytes, as `Record.tensor_bytes` has them."""
        return self.records[key].tensor_bytes(*self._place(self._slot(key)))

    def close(self) -> None:
        """Closes the files. Nothing may be on its way."""
        self._files.close()
        self._arena.unpin()

    def check_integrity(self) -> None:
        """Asserts that each slot has one owner and that the queues hold only live loads."""
        with self.monitor:
            self.slots.check_integrity()

    def _slot(self, key: ExpertKey) -> int:
        slot = self.slots.slot_of(key)
        assert slot is not None and self.slots.is_ready(key), f"{key} is not there"
        return slot

    def _place(self, slot: int) -> tuple[Arena, int]:
        """Memory of a slot, and where in it the slot begins."""
        if slot < self._num_first_slots:
            return self._arena, slot * self.slot_bytes
        return self._more[slot - self._num_first_slots], 0
