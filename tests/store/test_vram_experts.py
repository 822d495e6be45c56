"""Experts on their way from disk through main memory to a device: all of them arrive whole."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moebatch.errors import DoesNotFit, StorageError
from moebatch.schedule.slots import Chunk, ExpertKey, Load
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.direct import DirectFile
from moebatch.store.experts import ExpertStore
from moebatch.store.record import Record
from moebatch.store.vram_experts import NUM_STAGING_BUFFERS, VramExperts
from tests.store.expert_files import (
    CHUNK_BYTES,
    KEYS,
    NUM_EXPERTS,
    NUM_LAYERS,
    assert_is,
    write_experts,
)

CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[ExpertKey, Record]:
    monkeypatch.setattr("moebatch.store.record.PIECE_BYTES", CHUNK_BYTES)
    return write_experts(tmp_path)


class TwoLevels:
    """Main memory, a device above it, and a thread that moves chunks up as a lane does."""

    def __init__(
        self,
        records: dict[ExpertKey, Record],
        *,
        dram_slots: int,
        vram_slots: int,
        in_dram: tuple[ExpertKey, ...] = (),
        in_vram: tuple[ExpertKey, ...] = (),
        stages: bool = False,
    ) -> None:
        self.dram = ExpertStore(records, num_slots=dram_slots, resident=in_dram)
        self.memory = DeviceMemory(CPU, 2**24)
        self.vram = VramExperts(
            self.dram,
            self.memory,
            num_slots=vram_slots,
            resident=in_vram,
            stages=stages,
            chunk_bytes=CHUNK_BYTES,
        )
        self.vram.load_residents()
        self.changed = self.dram.changed
        self.num_moved_bytes = 0
        self._going_up: set[ExpertKey] = set()
        self._is_closing = False
        self.vram.slots.on_drop = self._not_needed_below
        self._mover = threading.Thread(target=self._move)
        self._mover.start()

    def announce(self, keys: list[ExpertKey]) -> None:
        with self.changed:
            self.vram.slots.announce(keys)
            self.dram.slots.announce(key for key in keys if self.vram.slots.holds(key))
            self.changed.notify_all()

    def compute(self, layer: int, experts: list[int]) -> list[int]:
        """Requires experts, compares every byte of each, and returns the order of their arrival."""
        waiting = [ExpertKey(layer, expert) for expert in experts]
        with self.changed:
            self.vram.slots.withdraw(layer, keep=experts)
            for key in waiting:
                self._require(key)
            self.changed.notify_all()
        order = []
        while waiting:
            key = self._use_first(waiting)
            waiting.remove(key)
            assert_is(key, self.vram.tensors(key))
            order.append(key.expert)
            with self.changed:
                self.vram.slots.finish(key, keep=False)
                self.vram.slots.check_integrity()
                self.dram.slots.check_integrity()
                self.changed.notify_all()
        return order

    def close(self) -> None:
        with self.changed:
            self._is_closing = True
            self.changed.notify_all()
        self._mover.join()
        self.vram.close()
        self.dram.close()

    def _require(self, key: ExpertKey) -> None:
        self.vram.slots.require(key)
        if not self.vram.slots.is_ready(key):
            self.dram.slots.require(key)

    def _use_first(self, waiting: list[ExpertKey]) -> ExpertKey:
        with self.changed:
            while (key := self.vram.slots.first_ready(waiting)) is None:
                self._hurry_below(waiting)
                if self.dram.failure is not None:
                    raise self.dram.failure
                self.changed.wait()
            self.vram.slots.use(key)
            return key

    def _hurry_below(self, waiting: list[ExpertKey]) -> None:
        missing = [key for key in waiting if self.vram.slots.is_missing(key)]
        here = [key for key in missing if self.dram.slots.is_ready(key)]
        for key in (here or missing)[:1]:
            self.dram.slots.require(key)
            self.dram.slots.hurry(key)
            self.changed.notify_all()

    def _move(self) -> None:
        while (chunk := self._next_chunk()) is not None:
            self.vram.copy(chunk)
            self.num_moved_bytes += self.vram.chunk_bytes(chunk)
            with self.changed:
                self.vram.slots.finish_chunk(chunk)
                if chunk.load.is_ready:
                    self._not_needed_below(chunk.load.key)
                self.changed.notify_all()

    def _next_chunk(self) -> Chunk | None:
        with self.changed:
            while not self._is_closing:
                chunk = self.vram.slots.next_chunk(self._is_below)
                if chunk is not None:
                    if chunk.load.key not in self._going_up:
                        self._going_up.add(chunk.load.key)
                        self.dram.slots.use(chunk.load.key)
                    return chunk
                self.changed.wait()
            return None

    def _is_below(self, load: Load) -> bool:
        return self.dram.slots.is_ready(load.key)

    def _not_needed_below(self, key: ExpertKey) -> None:
        if key in self._going_up:
            self._going_up.remove(key)
            self.dram.slots.finish(key, keep=False)


@pytest.fixture
def opened() -> Iterator[list[TwoLevels]]:
    levels: list[TwoLevels] = []
    yield levels
    for each in levels:
        each.close()


@pytest.mark.parametrize("dram_slots", [1, 2, len(KEYS)])
@pytest.mark.parametrize("vram_slots", [1, 2, 5])
@pytest.mark.parametrize("num_resident", [0, 2])
@pytest.mark.parametrize("stages", [False, True])
def test_every_expert_arrives_whole_whatever_is_announced(
    records: dict[ExpertKey, Record],
    opened: list[TwoLevels],
    dram_slots: int,
    vram_slots: int,
    num_resident: int,
    stages: bool,
) -> None:
    rng = random.Random(10 * dram_slots + vram_slots)
    resident = rng.sample(KEYS, 2 * num_resident)
    levels = TwoLevels(
        records,
        dram_slots=dram_slots,
        vram_slots=vram_slots,
        in_dram=tuple(resident[:num_resident]),
        in_vram=tuple(resident[num_resident:]),
        stages=stages,
    )
    opened.append(levels)
    for step in range(16):
        levels.announce(rng.sample(KEYS, rng.randrange(len(KEYS))))
        experts = rng.sample(range(NUM_EXPERTS), rng.randint(1, NUM_EXPERTS))
        assert sorted(levels.compute(step % NUM_LAYERS, experts)) == sorted(experts)


def test_residents_are_there_at_once_and_nothing_of_them_stays_below(
    records: dict[ExpertKey, Record], opened: list[TwoLevels]
) -> None:
    levels = TwoLevels(records, dram_slots=0, vram_slots=0, in_vram=KEYS)
    opened.append(levels)
    for layer in range(NUM_LAYERS):
        levels.compute(layer, list(range(NUM_EXPERTS)))
    assert levels.dram.statistics.num_bytes == 0
    assert levels.num_moved_bytes == 0


def test_experts_of_main_memory_are_read_once_and_moved_each_time(
    records: dict[ExpertKey, Record], opened: list[TwoLevels]
) -> None:
    levels = TwoLevels(records, dram_slots=0, vram_slots=2, in_dram=KEYS)
    opened.append(levels)
    for _ in range(2):
        for layer in range(NUM_LAYERS):
            levels.compute(layer, list(range(NUM_EXPERTS)))
    tensor_bytes = sum(place.num_bytes for place in records[KEYS[0]].places)
    assert levels.num_moved_bytes == 2 * len(KEYS) * tensor_bytes
    assert levels.dram.statistics.num_bytes == sum(r.num_bytes for r in records.values())


def test_slots_are_stacked_weights(
    records: dict[ExpertKey, Record], opened: list[TwoLevels]
) -> None:
    levels = TwoLevels(records, dram_slots=0, vram_slots=0, in_vram=KEYS)
    opened.append(levels)
    for key in KEYS:
        slot = levels.vram.slots.slot_of(key)
        assert_is(key, [stacked[slot] for stacked in levels.vram.stacked])


def test_slots_are_part_of_the_capacity_of_the_device(records: dict[ExpertKey, Record]) -> None:
    dram = ExpertStore(records, num_slots=1)
    with pytest.raises(DoesNotFit, match="vram: experts and their slots take 81.0 KiB, but only"):
        VramExperts(dram, DeviceMemory(CPU, 80 * 2**10), num_slots=2, resident=KEYS[:1])
    dram.close()


def test_no_more_chunks_can_be_staged_than_there_are_buffers(
    records: dict[ExpertKey, Record],
) -> None:
    dram = ExpertStore(records, num_slots=0, resident=KEYS)
    memory = DeviceMemory(CPU, 2**20)
    vram = VramExperts(dram, memory, num_slots=2, stages=True, chunk_bytes=CHUNK_BYTES)
    with vram.changed:
        dram.wait(lambda: all(map(dram.slots.is_ready, KEYS)))
        vram.slots.announce(KEYS)
    chunks = [vram.slots.next_chunk() for _ in range(NUM_STAGING_BUFFERS + 1)]
    for chunk in chunks[:-1]:
        assert chunk is not None
        vram.stage(chunk)
    assert chunks[-1] is not None
    with pytest.raises(AssertionError, match="all staging buffers are full"):
        vram.stage(chunks[-1])
    vram.close()
    dram.close()


def test_a_reader_that_fails_fails_whoever_waits_above(
    records: dict[ExpertKey, Record],
    opened: list[TwoLevels],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: DirectFile, target: memoryview, offset: int) -> None:
        raise StorageError("disk broke")

    monkeypatch.setattr(DirectFile, "read", fail)
    levels = TwoLevels(records, dram_slots=2, vram_slots=2)
    opened.append(levels)
    with pytest.raises(StorageError, match="disk broke"):
        levels.compute(0, [0, 1])
