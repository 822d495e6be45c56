"""The layout of slots: chunks cover every byte once, and slots are stacked weights."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moebatch.checkpoint.index import Checkpoint
from moebatch.checkpoint.record import Place, Record, RecordFiles
from moebatch.errors import CheckpointError, StorageError
from moebatch.layout.footprint import PACKED_ALIGNMENT
from moebatch.plan.pricing import launches as of_copies
from moebatch.store.dense import DenseLoader, dense_bytes
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts import packed
from moebatch.store.experts.packed import PackedLayout, load_packed
from moebatch.store.memory import Arena
from tests.store.expert_files import CHUNK_BYTES, KEYS, SHAPES, assert_is, write_experts

sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=5)


def record_of(sizes: list[int]) -> Record:
    """An expert of vectors of so many numbers."""
    places = tuple(
        Place(
            buffer_offset=0,
            num_bytes=2 * size,
            shape=(size,),
            dtype=torch.bfloat16,
            stored=torch.bfloat16,
        )
        for size in sizes
    )
    return Record(chunks=(), places=places, num_bytes=0)


@given(sizes, st.integers(1, 40).map(lambda count: count * PACKED_ALIGNMENT))
def test_chunks_cover_each_byte_of_each_tensor_once(sizes: list[int], chunk_bytes: int) -> None:
    layout = PackedLayout.of([record_of(sizes)], chunk_bytes)
    seen = [torch.zeros(2 * size, dtype=torch.int64) for size in sizes]
    for chunk in layout.chunks:
        assert 0 < chunk.num_bytes <= chunk.stop - chunk.start <= chunk_bytes
        for part in chunk.parts:
            seen[part.tensor][part.start : part.start + part.num_bytes] += 1
            assert chunk.start <= part.offset
            assert part.offset + part.num_bytes <= chunk.stop
            assert part.offset - part.start == layout.offsets[part.tensor]
    assert all((counts == 1).all() for counts in seen)


@pytest.mark.parametrize(("width", "is_apart"), [(48, False), (48, True), (45, False)])
def test_tensors_that_lie_one_behind_the_other_are_copied_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, is_apart: bool
) -> None:
    """Wherever in a block of the file an expert begins; not where they would not be aligned."""
    shapes = {"a": (7, width), "b": (6, width), "c": (width,)}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{expert}.{part}": torch.randn(shape, generator=generator)
        for expert in range(3)
        for part, shape in shapes.items()
    }
    kept = {name[::-1] if is_apart else name: each for name, each in weights.items()}
    save_file(kept, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    records = []
    for expert in range(3):
        names = [f"{expert}.{part}" for part in "cab"]
        extents = [checkpoint.extent(name[::-1] if is_apart else name) for name in names]
        records.append(Record.of(extents))
    layout, copied = PackedLayout.of(records, chunk_bytes=1024), list[int]()
    copy = packed.copy_bytes

    def counted(room: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(len(room))
        copy(room, source)

    monkeypatch.setattr(packed, "copy_bytes", counted)
    for expert, record in enumerate(records):
        room, arena = torch.zeros(layout.num_bytes, dtype=torch.uint8), Arena(record.num_bytes)
        with closing(RecordFiles([record])) as files:
            for piece in record.pieces:
                files.read(piece, arena.view(piece.buffer_offset, piece.num_bytes))
        copied.clear()
        for chunk in layout.chunks:
            chunk.copy(record.tensor_bytes(arena, 0), room[chunk.start : chunk.stop])
        for part, tensor in zip("cab", layout.tensors(room), strict=True):
            assert tensor.equal(weights[f"{expert}.{part}"])
            assert tensor.data_ptr() % 16 == room.data_ptr() % 16
        num_runs = 3 if is_apart or width % 4 else 1
        assert sum(copied) == 4 * 14 * width
        assert len(copied) == of_copies.of_transfer(sum(copied), num_runs) + len(layout.chunks) - 1


@given(sizes)
def test_tensors_lie_aligned_and_apart_and_stacked_slots_are_the_same_memory(
    sizes: list[int],
) -> None:
    layout = PackedLayout.of([record_of(sizes)])
    rooms = torch.zeros(3 * layout.num_bytes, dtype=torch.uint8)
    for slot, room in enumerate(rooms.view(3, -1)):
        for number, tensor in enumerate(layout.tensors(room)):
            assert layout.offsets[number] % PACKED_ALIGNMENT == 0
            tensor.fill_(10 * slot + number)
    for number, stacked in enumerate(layout.stacked(rooms)):
        assert stacked.shape == (3, sizes[number])
        for slot in range(3):
            assert (stacked[slot] == 10 * slot + number).all()


def test_experts_of_other_shapes_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"in main memory only; set resources\.device"):
        PackedLayout.of([record_of([3]), record_of([4])])


@pytest.mark.parametrize("piece_bytes", [4096, 16 * 2**20])
def test_experts_come_from_files_into_packed_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr("moebatch.checkpoint.record.PIECE_BYTES", piece_bytes)
    records = write_experts(tmp_path)
    layout = PackedLayout.of(records.values(), CHUNK_BYTES)
    slots = torch.zeros(len(KEYS), layout.num_bytes, dtype=torch.uint8)
    load_packed(records, layout, dict(zip(KEYS[::-1], slots, strict=True)))
    for key, slot in zip(KEYS[::-1], slots, strict=True):
        assert_is(key, layout.tensors(slot))


def test_files_are_given_back_where_one_is_missing_or_reading_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "a").mkdir()
    (tmp_path / "z").mkdir()
    records = write_experts(tmp_path / "a")
    missing = {KEYS[0]: write_experts(tmp_path / "z")[KEYS[0]]}
    (tmp_path / "z" / "model.safetensors").unlink()
    layout = PackedLayout.of(records.values())
    slots = torch.zeros(len(KEYS), layout.num_bytes, dtype=torch.uint8)
    before = {*Path("/proc/self/fd").iterdir()}
    with pytest.raises(StorageError, match="cannot be opened"):
        RecordFiles([*records.values(), *missing.values()])
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(StorageError, match="reading at byte"):
        load_packed(records, layout, dict(zip(KEYS, slots, strict=True)))
    assert {*Path("/proc/self/fd").iterdir()} == before


def test_dense_weights_live_in_the_memory_of_a_device(tmp_path: Path) -> None:
    write_experts(tmp_path, KEYS[:1])
    checkpoint = Checkpoint.open(tmp_path)
    weights = [checkpoint.weight(f"{part}.0.0", shape) for part, shape in enumerate(SHAPES)]
    memory = DeviceMemory(torch.device("cpu"), 2**20)
    loader = DenseLoader([(weight, torch.float32) for weight in weights], memory)
    assert_is(KEYS[0], [loader.load(weight, torch.float32) for weight in weights])
    loader.close()
    needed = sum(dense_bytes(shape, torch.float32) for shape in SHAPES)
    assert needed <= memory.used_bytes < needed + 512


def test_dense_weights_are_not_read_from_a_file_that_became_shorter(tmp_path: Path) -> None:
    write_experts(tmp_path, KEYS[:1])
    checkpoint = Checkpoint.open(tmp_path)
    weight = checkpoint.weight("2.0.0", SHAPES[2])
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with (
        closing(DenseLoader([(weight, torch.float32)])) as loader,
        pytest.raises(StorageError, match="was changed while it was in use"),
    ):
        loader.load(weight, torch.float32)
