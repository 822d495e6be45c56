"""Experts read ahead: slots, reads, and the order in which experts come back."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moebatch.checkpoint import record as record_module
from moebatch.checkpoint.direct import PAGE_BYTES, DirectFile
from moebatch.checkpoint.header import Extent
from moebatch.checkpoint.index import Checkpoint
from moebatch.checkpoint.record import Record
from moebatch.engine.lanes.read_ahead import ReadAhead
from moebatch.errors import StorageError
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.experts.dram import ExpertStore
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
def opened() -> Iterator[list[ReadAhead]]:
    found: list[ReadAhead] = []
    yield found
    for reading in found:
        reading.close()
        reading.store.close()


@pytest.fixture
def reading(records: dict[ExpertKey, Record], opened: list[ReadAhead]) -> Callable[..., ReadAhead]:
    """Reads ahead through so many slots."""

    def start(*, num_readers: int = 2, **options: object) -> ReadAhead:
        opened.append(ReadAhead(ExpertStore(records, **options), num_readers=num_readers))
        return opened[-1]

    return start


def take(ahead: ReadAhead, layer: int, experts: list[int]) -> list[int]:
    """Requires experts, compares every byte, and returns the order in which they came."""
    order = []
    for expert, tensors in ahead.require(layer, experts):
        ahead.store.check_integrity()
        for part, tensor in enumerate(tensors):
            assert tensor.equal(weight(ExpertKey(layer, expert), part))
        order.append(expert)
    assert sorted(order) == sorted(experts)
    return order


@pytest.mark.parametrize("num_slots", [1, 2, 5, len(KEYS)])
@pytest.mark.parametrize("num_resident", [0, 3])
def test_every_expert_arrives_whole_whatever_is_prefetched(
    reading: Callable[..., ReadAhead],
    num_slots: int,
    num_resident: int,
) -> None:
    ahead = reading(num_slots=num_slots, resident=KEYS[:num_resident])
    rng = random.Random(num_slots)
    for step in range(40):
        layer = step % LAYERS
        ahead.prefetch(rng.sample(KEYS, rng.randrange(len(KEYS))))
        ahead.store.check_integrity()
        take(ahead, layer, rng.sample(range(EXPERTS), rng.randint(1, EXPERTS)))


def test_everything_resident_needs_no_slot_and_is_read_once(
    records: dict[ExpertKey, Record],
    reading: Callable[..., ReadAhead],
) -> None:
    ahead = reading(num_slots=0, resident=KEYS)
    for _ in range(3):
        for layer in range(LAYERS):
            take(ahead, layer, list(range(EXPERTS)))
    assert ahead.statistics.num_bytes == sum(record.num_bytes for record in records.values())


def test_tensors_of_residents_are_the_same_object_each_time(
    reading: Callable[..., ReadAhead],
) -> None:
    """Of others they are made anew: another expert may have had their slot in between."""
    ahead = reading(num_slots=1, resident=KEYS[:EXPERTS])
    first, second = (
        {key: tensors for key in KEYS[: 2 * EXPERTS] for _, tensors in _required(ahead, key)}
        for _ in range(2)
    )
    for key in first:
        assert (first[key] is second[key]) == (key in KEYS[:EXPERTS])
    take(ahead, 0, list(range(EXPERTS)))
    take(ahead, 1, list(range(EXPERTS)))


def _required(ahead: ReadAhead, key: ExpertKey) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    return ahead.require(key.layer, [key.expert])


@pytest.mark.parametrize("num_slots", [1, 3])
def test_experts_stay_in_memory_that_is_added_until_nothing_is_read_any_more(
    reading: Callable[..., ReadAhead], num_slots: int
) -> None:
    ahead = reading(num_slots=num_slots, resident=KEYS[:2])
    before, num_read = ahead.store.num_bytes, []
    while ahead.store.can_grow:
        ahead.store.grow()
        ahead.store.check_integrity()
        num_bytes = ahead.statistics.num_bytes
        for layer in range(LAYERS):
            take(ahead, layer, list(range(EXPERTS)))
        num_read.append(ahead.statistics.num_bytes - num_bytes)
    added = len(KEYS) - 2
    assert ahead.store.num_grown == added
    assert ahead.store.num_bytes == before + added * ahead.store.slot_bytes
    assert all(later < earlier for earlier, later in pairwise(num_read[1:]))
    num_bytes = ahead.statistics.num_bytes
    for layer in range(LAYERS):
        take(ahead, layer, list(range(EXPERTS)))
    assert ahead.statistics.num_bytes == num_bytes


def test_what_is_is_ready_comes_before_what_must_be_read(reading: Callable[..., ReadAhead]) -> None:
    ahead = reading(num_slots=2, resident=[ExpertKey(0, 3)])
    take(ahead, 0, [3])
    assert take(ahead, 0, [0, 1, 3])[0] == 3


def test_an_prefetched_expert_is_not_read_again_when_it_is_required(
    records: dict[ExpertKey, Record],
    reading: Callable[..., ReadAhead],
) -> None:
    ahead = reading(num_slots=2)
    ahead.prefetch(KEYS[:2])
    take(ahead, 0, [0, 1])
    assert ahead.statistics.num_bytes == sum(records[key].num_bytes for key in KEYS[:2])


def test_a_required_expert_is_read_before_all_prefetched_ones(
    records: dict[ExpertKey, Record],
    reading: Callable[..., ReadAhead],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, offsets = threading.Event(), []
    read = DirectFile.read

    def slow_read(self: DirectFile, target: memoryview, offset: int) -> None:
        offsets.append(offset)
        gate.wait(PATIENCE_S)
        read(self, target, offset)

    monkeypatch.setattr(DirectFile, "read", slow_read)
    ahead = reading(num_slots=4, num_readers=1)
    ahead.prefetch(KEYS[:4])
    while not offsets:
        pass
    chosen = ahead.require(2, [3])
    threading.Timer(0.05, gate.set).start()
    assert next(chosen)[0] == 3
    wanted = [piece.file_offset for piece in records[ExpertKey(2, 3)].pieces]
    assert offsets[1 : 1 + len(wanted)] == wanted
    chosen.close()


@pytest.mark.parametrize("error", [StorageError("disk broke"), RuntimeError("bug")])
def test_a_reader_that_fails_fails_the_compute_and_does_not_hang_it(
    reading: Callable[..., ReadAhead],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(self: DirectFile, target: memoryview, offset: int) -> None:
        raise error

    monkeypatch.setattr(DirectFile, "read", fail)
    ahead = reading(num_slots=2)
    with pytest.raises(type(error), match=str(error)):
        take(ahead, 1, [0, 2])


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def written_again(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, 1))  # however soon that was


@pytest.mark.parametrize("change", [shortened, written_again])
def test_a_file_that_changes_while_it_is_read_is_an_error_not_garbage(
    reading: Callable[..., ReadAhead], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    ahead = reading(num_slots=2)
    change(tmp_path / "model.safetensors")
    with pytest.raises(StorageError, match=r"model\.safetensors: was changed while it was in use"):
        for layer in range(LAYERS):
            take(ahead, layer, list(range(EXPERTS)))


@pytest.mark.parametrize("num_lost", [1, PAGE_BYTES, 20_000])
def test_a_file_that_became_shorter_since_its_header_was_read_is_not_opened(
    records: dict[ExpertKey, Record], tmp_path: Path, num_lost: int
) -> None:
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - num_lost)
    with pytest.raises(StorageError, match="was changed while it was in use"):
        ExpertStore(records, num_slots=2)


def test_where_o_direct_is_refused_files_are_read_through_the_page_cache(
    reading: Callable[..., ReadAhead],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really_open = os.open

    def refuse_direct(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return really_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    ahead = reading(num_slots=2)
    for layer in range(LAYERS):
        take(ahead, layer, list(range(EXPERTS)))
    assert not ahead.store.is_direct


def test_neighbouring_tensors_are_read_in_one_run(tmp_path: Path) -> None:
    save_file({name: torch.zeros(256, 16) for name in "abc"}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    together = Record.of([checkpoint.extent(name) for name in "abc"])
    apart = Record.of([checkpoint.extent(name) for name in "ac"])
    assert len(together.pieces) == 1
    assert len(apart.pieces) == 2


def test_small_reads_are_one_chunk_with_those_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "PIECE_BYTES", 64 * PAGE_BYTES)
    monkeypatch.setattr(record_module, "SMALL_BYTES", 8 * PAGE_BYTES)
    pages = [1, 30, 2, 1, 70, 4, 1, 40, 23, 9]  # two matrices with biases and scales, and others
    starts = [100 * PAGE_BYTES * number for number in range(len(pages))]
    sizes = [num_pages * PAGE_BYTES for num_pages in pages]
    record = Record.of(
        [
            Extent(path=Path("model"), offset=start, num_bytes=size, dtype="U8", shape=(size,))
            for start, size in zip(starts, sizes, strict=True)
        ]
    )
    assert [[piece.num_bytes // PAGE_BYTES for piece in chunk] for chunk in record.chunks] == [
        [1, 30, 2, 1],
        [64],
        [6, 4, 1],
        [40],
        [23],
        [9],
    ]
    assert [piece.file_offset for piece in record.pieces] == sorted(
        [*starts, starts[4] + 64 * PAGE_BYTES]
    )
