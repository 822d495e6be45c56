"""Experts in the memory of a device, coming up from main memory chunk by chunk."""

from collections.abc import Collection

from torch import Tensor

from moebatch.layout.placed import CHUNK_BYTES
from moebatch.schedule.slots.cache import Cache
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.packed import PackedLayout, load_packed


class VramExperts:
    """Slots of a device, all of the same layout, and the copies into them.

    `slots` decides what is where; a `PackedChunk` is a chunk there. A lane takes the next one that
    main memory has, copies it without holding the lock, and reports its arrival:

        with experts.monitor:
            chunk = experts.slots.next_chunk(lambda load: source.slots.is_ready(load.key))
        experts.copy(chunk)
        with experts.monitor:
            experts.slots.finish_chunk(chunk)
            experts.monitor.changed()

    Below, an expert has to be in use from its first chunk to its last.
    """

    def __init__(
        self,
        source: ExpertStore,
        memory: DeviceMemory,
        *,
        num_slots: int,
        resident: Collection[ExpertKey] = (),
        cache: Cache | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Raises DoesNotFit if the device has no room for `num_slots` and the residents."""
        self.monitor = source.monitor
        self.layout = PackedLayout.of(source.records.values(), chunk_bytes)
        num_chunks = dict.fromkeys(source.records, len(self.layout.chunks))
        self.slots = SlotQueue(num_chunks, num_slots=num_slots, resident=resident, cache=cache)
        self._source = source
        self._resident = tuple(resident)
        num_bytes = self.slots.num_slots * self.layout.num_bytes
        bytes_of_slots = memory.allocate(num_bytes, what="experts and their slots")
        self.stacked = self.layout.stacked(bytes_of_slots)
        """Each tensor over all slots: [slots, *its shape]."""
        self._rooms = bytes_of_slots.view(-1, self.layout.num_bytes).unbind()
        self._tensors = [self.layout.tensors(room) for room in self._rooms]

    def load_residents(self) -> None:
        """Reads experts that live here from their files, before anything else goes on.

        Raises StorageError when reading fails.
        """
        rooms = {key: self._rooms[self._slot(key)] for key in self._resident}
        load_packed(self._source.records, self.layout, rooms)
        with self.monitor:
            self.slots.fill_residents()

    def chunk_bytes(self, key: ExpertKey, number: int) -> int:
        """Bytes that `copy` moves of a chunk, alike for all experts."""
        return self.layout.chunks[number].num_bytes

    def copy(self, chunk: Chunk) -> None:
        """Copies a chunk up from main memory, where its expert is in use.

        It has arrived when this returns on an emulated device; on a GPU the copy is issued on the
        current stream.
        """
        packed = self.layout.chunks[chunk.number]
        room = self._rooms[chunk.slot][packed.start : packed.stop]
        packed.copy(self._source.tensor_bytes(chunk.load.key), room)

    def tensors(self, key: ExpertKey) -> tuple[Tensor, ...]:
        """The tensors of an expert that has arrived, valid as long as it is in use."""
        assert self.slots.is_ready(key), f"{key} is not there"
        return self._tensors[self._slot(key)]

    def _slot(self, key: ExpertKey) -> int:
        slot = self.slots.slot_of(key)
        assert slot is not None, f"{key} has no slot"
        return slot
