"""Where pages of a layer's weights come from: main memory below a device, or files."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES
from moebatch.checkpoint.record import Record, RecordFiles, slot_bytes
from moebatch.layout.footprint import PACKED_ALIGNMENT
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.packed import PackedLayout, copy_parts, load_packed


class PageSource(Protocol):
    """Experts of which any part can be had. A slot is uint8 [slot_bytes]."""

    @property
    def is_direct(self) -> bool:
        """Whether files are read past the page cache."""

    @property
    def slot_bytes(self) -> int:
        """Room of one expert."""

    @property
    def step_bytes(self) -> int:
        """Parts begin at multiples of it."""

    def num_bytes(self, key: ExpertKey) -> int:
        """Bytes of a slot that an expert fills."""

    def tensors(self, key: ExpertKey, slot: Tensor) -> tuple[Tensor, ...]:
        """The tensors of an expert that is in a slot; no copies."""

    def load(self, slots: Mapping[ExpertKey, Tensor]) -> None:
        """Reads experts from their files into slots where they stay. Raises StorageError."""

    def prefetch(self, keys: Sequence[ExpertKey]) -> None:
        """These come next, one after the other, each from its first part to its last."""

    def move(self, key: ExpertKey, start: int, room: Tensor) -> None:
        """Fills `room` with what lies from `start` on in a slot of an expert. Raises what reading
        failed with."""

    def forget(self) -> None:
        """What has been moved in part is not moved on."""

    def close(self) -> None:
        """Gives files back."""


class MemoryPages(PageSource):
    """Experts of the `ExpertStore` below; those that live on disk pass through its slots.

    One expert at a time is in use there, from its first part to its last, so one slot is enough.
    Used by one thread.
    """

    step_bytes = PACKED_ALIGNMENT

    def __init__(self, store: ExpertStore, sleep: Callable[[Callable[[], bool]], None]) -> None:
        """`sleep` returns when a condition holds that is looked at with the lock of `store` held;
        it raises what reading has failed with."""
        self._store = store
        self._sleep = sleep
        self._layout = PackedLayout.of(store.records.values())
        self._held: ExpertKey | None = None
        self._bytes: tuple[Tensor, ...] = ()

    @property
    def is_direct(self) -> bool:
        return self._store.is_direct

    @property
    def slot_bytes(self) -> int:
        return self._layout.num_bytes

    def num_bytes(self, key: ExpertKey) -> int:
        """Alike for all experts."""
        return self._layout.num_bytes

    def tensors(self, key: ExpertKey, slot: Tensor) -> tuple[Tensor, ...]:
        return self._layout.tensors(slot)

    def load(self, slots: Mapping[ExpertKey, Tensor]) -> None:
        """Reads experts from their files, past the slots below. Raises StorageError."""
        load_packed(self._store.records, self._layout, slots)

    def prefetch(self, keys: Sequence[ExpertKey]) -> None:
        """Has those that live on disk read ahead, as far as there are slots below."""
        with self._store.monitor:
            self._store.slots.prefetch(keys)
            self._store.monitor.changed()

    def move(self, key: ExpertKey, start: int, room: Tensor) -> None:
        if self._held != key:
            assert self._held is None, f"{self._held} has not been moved as a whole"
            self._hold(key)
            self._held, self._bytes = key, self._store.tensor_bytes(key)
        stop = start + len(room)
        copy_parts(self._layout.parts(start, stop), self._bytes, room, start)
        if stop == self._layout.num_bytes:
            self._wait_for_copies(key, room)
            self.forget()

    def forget(self) -> None:
        """Frees the slot below."""
        if self._held is not None:
            with self._store.monitor:
                self._store.slots.finish(self._held, keep=False)
                self._store.monitor.changed()
            self._held, self._bytes = None, ()

    def close(self) -> None:
        """The store below has an owner of its own."""

    def _hold(self, key: ExpertKey) -> None:
        """Waits until an expert is there, before all others, and keeps it."""
        slots = self._store.slots
        with self._store.monitor:
            slots.require(key)
            if not slots.is_ready(key):
                slots.hurry(key)
                self._store.monitor.changed()
                self._sleep(lambda: slots.is_ready(key))
            slots.use(key)

    def _wait_for_copies(self, key: ExpertKey, room: Tensor) -> None:
        """An expert that only passes through must not be overwritten on its way to a GPU."""
        with self._store.monitor:
            stays = self._store.slots.state(key) == "resident"
        if room.device.type == "cuda" and self._store.is_pinned and not stays:
            torch.cuda.current_stream(room.device).synchronize()


class FilePages(PageSource):
    """Experts in their files, read straight into slots in main memory, as they lie in the file.

    Used by one thread.
    """

    step_bytes = PAGE_BYTES

    def __init__(self, records: Mapping[ExpertKey, Record]) -> None:
        """Raises StorageError if a file cannot be opened."""
        assert not any(record.converts for record in records.values()), "parts are as in the file"
        self._records = records
        self._files = RecordFiles(records.values())
        self._slot_bytes = slot_bytes(records.values())

    @property
    def is_direct(self) -> bool:
        return self._files.is_direct

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    def num_bytes(self, key: ExpertKey) -> int:
        return self._records[key].num_bytes

    def tensors(self, key: ExpertKey, slot: Tensor) -> tuple[Tensor, ...]:
        memory = slot.numpy()
        return tuple(
            torch.frombuffer(
                memory, dtype=place.dtype, count=prod(place.shape), offset=place.buffer_offset
            ).view(place.shape)
            for place in self._records[key].places
        )

    def load(self, slots: Mapping[ExpertKey, Tensor]) -> None:
        for key, slot in slots.items():
            self.move(key, 0, slot[: self.num_bytes(key)])

    def prefetch(self, keys: Sequence[ExpertKey]) -> None:
        """Nothing is read ahead: slots are where experts are computed."""

    def move(self, key: ExpertKey, start: int, room: Tensor) -> None:
        target, stop = room.numpy().data, start + len(room)
        for piece in self._records[key].pieces:
            first = max(start, piece.buffer_offset)
            last = min(stop, piece.buffer_offset + piece.num_bytes)
            if first < last:
                room_of_piece = target[first - start : last - start]
                self._files.read(piece, room_of_piece, first - piece.buffer_offset)

    def forget(self) -> None:
        """Every read is for itself."""

    def close(self) -> None:
        self._files.close()
