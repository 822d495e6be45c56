"""Slots, readers and the order in which experts come back."""

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moebatch.errors import StorageError
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store import record as record_module
from moebatch.store.checkpoint import Checkpoint
from moebatch.store.direct import DirectFile
from moebatch.store.experts import ExpertStore
from moebatch.store.monitor import Monitor
from moebatch.store.record import Record
from tests.patience import PATIENCE_S

LAYERS, EXPERTS = 3, 4
KEYS = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def weight(key: ExpertKey, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * key.layer + 10 * key.expert + part)
    return torch.randn(70 + part, 33, generator=generator)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[ExpertKey, Record]:
    """Experts of two matrices each; small pieces, so that every expert takes several reads."""
    monkeypatch.setattr(record_module, "PIECE_BYTES", 4096)
    tensors = {f"{k.layer}.{k.expert}.{part}": weight(k, part) for k in KEYS for part in (0, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    return {
        k: Record.of([checkpoint.extent(f"{k.layer}.{k.expert}.{part}") for part in (0, 1)])
        for k in KEYS
    }


@pytest.fixture
def opened() -> Iterator[list[ExpertStore]]:
    stores: list[ExpertStore] = []
    yield stores
    for store in stores:
        store.close()


def take(store: ExpertStore, layer: int, experts: list[int]) -> list[int]:
    """Requires experts, compares every byte, and returns the order in which they came."""
    order = []
    for expert, tensors in store.require(layer, experts):
        store.check_integrity()
        for part, tensor in enumerate(tensors):
            assert tensor.equal(weight(ExpertKey(layer, expert), part))
        order.append(expert)
    assert sorted(order) == sorted(experts)
    return order


@pytest.mark.parametrize("num_slots", [1, 2, 5, len(KEYS)])
@pytest.mark.parametrize("num_resident", [0, 3])
def test_every_expert_arrives_whole_whatever_is_announced(
    records: dict[ExpertKey, Record],
    opened: list[ExpertStore],
    num_slots: int,
    num_resident: int,
) -> None:
    store = ExpertStore(records, num_slots=num_slots, resident=KEYS[:num_resident])
    opened.append(store)
    rng = random.Random(num_slots)
    for step in range(40):
        layer = step % LAYERS
        store.announce(rng.sample(KEYS, rng.randrange(len(KEYS))))
        store.check_integrity()
        take(store, layer, rng.sample(range(EXPERTS), rng.randint(1, EXPERTS)))


def test_everything_resident_needs_no_slot_and_is_read_once(
    records: dict[ExpertKey, Record], opened: list[ExpertStore]
) -> None:
    store = ExpertStore(records, num_slots=0, resident=KEYS)
    opened.append(store)
    for _ in range(3):
        for layer in range(LAYERS):
            take(store, layer, list(range(EXPERTS)))
    assert store.statistics.num_bytes == sum(record.num_bytes for record in records.values())


@pytest.mark.parametrize("num_slots", [1, 3])
def test_experts_stay_in_memory_that_is_added_until_nothing_is_read_any_more(
    records: dict[ExpertKey, Record], opened: list[ExpertStore], num_slots: int
) -> None:
    store = ExpertStore(records, num_slots=num_slots, resident=KEYS[:2])
    opened.append(store)
    before, num_read = store.num_bytes, []
    while store.can_grow:
        store.grow()
        store.check_integrity()
        num_bytes = store.statistics.num_bytes
        for layer in range(LAYERS):
            take(store, layer, list(range(EXPERTS)))
        num_read.append(store.statistics.num_bytes - num_bytes)
    added = len(KEYS) - 2
    assert store.statistics.num_grown == added
    assert store.num_bytes == before + added * store.slot_bytes
    assert all(later < earlier for earlier, later in pairwise(num_read[1:]))
    num_bytes = store.statistics.num_bytes
    for layer in range(LAYERS):
        take(store, layer, list(range(EXPERTS)))
    assert store.statistics.num_bytes == num_bytes


def test_what_is_at_hand_comes_before_what_must_be_read(
    records: dict[ExpertKey, Record], opened: list[ExpertStore]
) -> None:
    store = ExpertStore(records, num_slots=2, resident=[ExpertKey(0, 3)])
    opened.append(store)
    take(store, 0, [3])
    assert take(store, 0, [0, 1, 3])[0] == 3


def test_an_announced_expert_is_not_read_again_when_it_is_required(
    records: dict[ExpertKey, Record], opened: list[ExpertStore]
) -> None:
    store = ExpertStore(records, num_slots=2)
    opened.append(store)
    store.announce(KEYS[:2])
    take(store, 0, [0, 1])
    assert store.statistics.num_bytes == sum(records[key].num_bytes for key in KEYS[:2])


def test_a_required_expert_is_read_before_all_announced_ones(
    records: dict[ExpertKey, Record],
    opened: list[ExpertStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, offsets = threading.Event(), []
    read = DirectFile.read

    def slow_read(self: DirectFile, target: memoryview, offset: int) -> None:
        offsets.append(offset)
        gate.wait(PATIENCE_S)
        read(self, target, offset)

    monkeypatch.setattr(DirectFile, "read", slow_read)
    store = ExpertStore(records, num_slots=4, num_readers=1)
    opened.append(store)
    store.announce(KEYS[:4])
    while not offsets:
        pass
    chosen = store.require(2, [3])
    threading.Timer(0.05, gate.set).start()
    assert next(chosen)[0] == 3
    wanted = [piece.file_offset for piece in records[ExpertKey(2, 3)].pieces]
    assert offsets[1 : 1 + len(wanted)] == wanted
    chosen.close()


@pytest.mark.parametrize("error", [StorageError("disk broke"), RuntimeError("bug")])
def test_a_reader_that_fails_fails_the_compute_and_does_not_hang_it(
    records: dict[ExpertKey, Record],
    opened: list[ExpertStore],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(self: DirectFile, target: memoryview, offset: int) -> None:
        raise error

    monkeypatch.setattr(DirectFile, "read", fail)
    store = ExpertStore(records, num_slots=2)
    opened.append(store)
    with pytest.raises(type(error), match=str(error)):
        take(store, 1, [0, 2])


def test_a_file_that_became_shorter_is_an_error_not_garbage(
    records: dict[ExpertKey, Record], opened: list[ExpertStore], tmp_path: Path
) -> None:
    store = ExpertStore(records, num_slots=2)
    opened.append(store)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(StorageError, match="was it changed"):
        for layer in range(LAYERS):
            take(store, layer, list(range(EXPERTS)))


def test_whoever_waits_by_himself_is_woken_by_a_failure(
    records: dict[ExpertKey, Record],
    opened: list[ExpertStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: DirectFile, target: memoryview, offset: int) -> None:
        raise StorageError("disk broke")

    monkeypatch.setattr(DirectFile, "read", fail)
    monitor = Monitor()
    store = ExpertStore(records, num_slots=2, monitor=monitor)
    opened.append(store)
    store.announce(KEYS[:1])
    with monitor:
        assert monitor.wait_for(lambda: store.failure is not None, timeout_s=PATIENCE_S)
    with pytest.raises(StorageError, match="disk broke"):
        store.hold(KEYS[5])


def test_an_expert_that_is_held_stays_until_it_is_let_go(
    records: dict[ExpertKey, Record], opened: list[ExpertStore]
) -> None:
    store = ExpertStore(records, num_slots=2)
    opened.append(store)
    store.announce(KEYS[1:3])
    store.hold(KEYS[0])
    for layer in range(LAYERS):
        take(store, layer, [1, 2])
    for part, tensor in enumerate(store.tensors(KEYS[0])):
        assert tensor.equal(weight(KEYS[0], part))
        assert store.tensor_bytes(KEYS[0])[part].equal(tensor.view(-1).view(torch.uint8))
    store.let_go(KEYS[0])
    store.check_integrity()
    with pytest.raises(AssertionError, match="is not there"):
        store.tensors(KEYS[0])


def test_what_is_held_comes_although_others_that_are_required_have_all_slots(
    records: dict[ExpertKey, Record], opened: list[ExpertStore]
) -> None:
    store = ExpertStore(records, num_slots=1)
    opened.append(store)
    waiting = store.require(0, [0, 1])
    store.hold(KEYS[5])
    store.let_go(KEYS[5])
    assert sorted(expert for expert, _ in waiting) == [0, 1]


def test_every_read_is_told_with_where_and_when(
    records: dict[ExpertKey, Record], opened: list[ExpertStore]
) -> None:
    told: list[tuple[ExpertKey, int, int, int, float, float]] = []
    start_s = time.perf_counter()
    store = ExpertStore(
        records, num_slots=2, num_readers=2, on_read=lambda *read: told.append(read)
    )
    opened.append(store)
    take(store, 1, [0, 2])
    end_s = time.perf_counter()
    reads = {(key, number): rest for key, number, *rest in told}
    wanted = [ExpertKey(1, 0), ExpertKey(1, 2)]
    assert set(reads) == {
        (key, number) for key in wanted for number in range(len(records[key].pieces))
    }
    for slot, reader, started_s, ended_s in reads.values():
        assert slot in (0, 1)
        assert reader in (0, 1)
        assert start_s <= started_s <= ended_s <= end_s


def test_a_callback_that_fails_is_a_failure_of_the_store(
    records: dict[ExpertKey, Record], opened: list[ExpertStore]
) -> None:
    def fail(*read: object) -> None:
        raise RuntimeError("bug")

    store = ExpertStore(records, num_slots=2, on_read=fail)
    opened.append(store)
    with pytest.raises(RuntimeError, match="bug"):
        take(store, 0, [0])


def test_where_o_direct_is_refused_files_are_read_through_the_page_cache(
    records: dict[ExpertKey, Record],
    opened: list[ExpertStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really_open = os.open

    def refuse_direct(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return really_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    store = ExpertStore(records, num_slots=2)
    opened.append(store)
    for layer in range(LAYERS):
        take(store, layer, list(range(EXPERTS)))
    assert not store.reads_past_page_cache


def test_neighbouring_tensors_are_read_in_one_run(tmp_path: Path) -> None:
    save_file({name: torch.zeros(64, 16) for name in "abc"}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    together = Record.of([checkpoint.extent(name) for name in "abc"])
    apart = Record.of([checkpoint.extent(name) for name in "ac"])
    assert len(together.pieces) == 1
    assert len(apart.pieces) == 2
