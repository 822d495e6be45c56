"""Experts on their way from disk through main memory to a device: all of them arrive whole."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.direct import DirectFile
from moebatch.checkpoint.record import Record
from moebatch.errors import DoesNotFit, StorageError
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.vram import VramExperts
from tests.store.expert_files import (
    CHUNK_BYTES,
    KEYS,
    NUM_EXPERTS,
    NUM_LAYERS,
    assert_is,
    write_experts,
)
from tests.store.two_levels import TwoLevels

CPU = torch.device("cpu")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[ExpertKey, Record]:
    monkeypatch.setattr("moebatch.checkpoint.record.PIECE_BYTES", CHUNK_BYTES)
    return write_experts(tmp_path)


@pytest.fixture
def opened() -> Iterator[list[TwoLevels]]:
    levels: list[TwoLevels] = []
    yield levels
    for each in levels:
        each.close()


@pytest.mark.parametrize("dram_slots", [1, 2, len(KEYS)])
@pytest.mark.parametrize("vram_slots", [1, 2, 5])
@pytest.mark.parametrize("num_resident", [0, 2])
def test_every_expert_arrives_whole_whatever_is_prefetched(
    records: dict[ExpertKey, Record],
    opened: list[TwoLevels],
    dram_slots: int,
    vram_slots: int,
    num_resident: int,
) -> None:
    rng = random.Random(10 * dram_slots + vram_slots)
    resident = rng.sample(KEYS, 2 * num_resident)
    levels = TwoLevels(
        records,
        dram_slots=dram_slots,
        vram_slots=vram_slots,
        in_dram=tuple(resident[:num_resident]),
        in_vram=tuple(resident[num_resident:]),
    )
    opened.append(levels)
    for step in range(16):
        levels.prefetch(rng.sample(KEYS, rng.randrange(len(KEYS))))
        experts = rng.sample(range(NUM_EXPERTS), rng.randint(1, NUM_EXPERTS))
        assert sorted(levels.compute(step % NUM_LAYERS, experts)) == sorted(experts)


def test_residents_are_there_at_once_and_nothing_of_them_stays_below(
    records: dict[ExpertKey, Record], opened: list[TwoLevels]
) -> None:
    levels = TwoLevels(records, dram_slots=0, vram_slots=0, in_vram=KEYS)
    opened.append(levels)
    for layer in range(NUM_LAYERS):
        levels.compute(layer, list(range(NUM_EXPERTS)))
    assert levels.reading.statistics.num_bytes == 0
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
    assert levels.reading.statistics.num_bytes == sum(r.num_bytes for r in records.values())


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
    with pytest.raises(DoesNotFit, match=r"^vram: experts and their slots take 81\.0 KiB"):
        VramExperts(dram, DeviceMemory(CPU, 80 * 2**10), num_slots=2, resident=KEYS[:1])
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
