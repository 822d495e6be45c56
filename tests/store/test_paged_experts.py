"""Weights in pages: every layer is whole when its pages have been moved, however many they are."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.direct import DirectFile
from moebatch.checkpoint.record import Record
from moebatch.engine.lanes.read_ahead import ReadAhead
from moebatch.errors import DoesNotFit, StorageError
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.page_sources import FilePages, MemoryPages
from moebatch.store.experts.paged import PageCut, PagedExperts
from tests.store.expert_files import (
    CHUNK_BYTES,
    KEYS,
    NUM_EXPERTS,
    NUM_LAYERS,
    assert_is,
    write_experts,
)

CPU = torch.device("cpu")
RESIDENT = KEYS[1:6:2]  # another number of experts in each layer
PAGES = (1, 2, 3, 5, 7, 500)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[ExpertKey, Record]:
    monkeypatch.setattr("moebatch.checkpoint.record.PIECE_BYTES", CHUNK_BYTES)
    return write_experts(tmp_path)


@pytest.fixture
def opened() -> Iterator[list[ReadAhead | PagedExperts]]:
    things: list[ReadAhead | PagedExperts] = []
    yield things
    for thing in reversed(things):
        thing.close()
        if isinstance(thing, ReadAhead):
            thing.store.close()


def assert_step_is_there(paged: PagedExperts, step: int, num_layers: int = NUM_LAYERS) -> None:
    for expert in range(NUM_EXPERTS):
        assert_is(ExpertKey(step % num_layers, expert), paged.tensors(step, expert))


def move(paged: PagedExperts, step: int, num_pages: int, *, has_staging: bool) -> int:
    """Moves all pages of a step, and returns their bytes."""
    num_bytes = 0
    for page in range(num_pages):
        if has_staging:
            paged.stage(step, page, num_pages)
        paged.page(step, page, num_pages)
        num_bytes += paged.num_bytes(step, page, num_pages)
    return num_bytes


def over_dram(
    records: dict[ExpertKey, Record],
    opened: list[ReadAhead | PagedExperts],
    *,
    num_slots: int,
    in_dram: tuple[ExpertKey, ...] = (),
    resident: tuple[ExpertKey, ...] = RESIDENT,
    has_staging: bool = False,
) -> tuple[ReadAhead, PagedExperts]:
    """Pages of a device above main memory."""
    dram = ReadAhead(ExpertStore(records, num_slots=num_slots, resident=in_dram))
    opened.append(dram)
    paged = PagedExperts(
        MemoryPages(dram.store, dram.sleep),
        DeviceMemory(CPU, 2**24),
        records,
        num_layers=NUM_LAYERS,
        resident=resident,
        has_staging=has_staging,
    )
    opened.append(paged)
    paged.load_residents()
    return dram, paged


@pytest.mark.parametrize("has_staging", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2, len(KEYS)])
@pytest.mark.parametrize("in_dram", [(), KEYS[4:9], KEYS])
def test_two_layers_in_turn_are_there_in_full(
    records: dict[ExpertKey, Record],
    opened: list[ReadAhead | PagedExperts],
    num_slots: int,
    in_dram: tuple[ExpertKey, ...],
    has_staging: bool,
) -> None:
    dram, paged = over_dram(
        records, opened, num_slots=num_slots, in_dram=in_dram, has_staging=has_staging
    )
    for step in range(2 * NUM_LAYERS):
        num_pages = PAGES[step % len(PAGES)]
        num_bytes = move(paged, step, num_pages, has_staging=has_staging)
        assert num_bytes == paged.num_bytes(step)
        assert_step_is_there(paged, step)
        if step:
            assert_step_is_there(paged, step - 1)
        dram.store.check_integrity()


@pytest.mark.parametrize("num_pages", PAGES)
def test_files_are_read_straight_into_halves_where_there_is_no_device(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts], num_pages: int
) -> None:
    memory = DeviceMemory(CPU, 2**24, level="dram")
    paged = PagedExperts(
        FilePages(records), memory, records, num_layers=NUM_LAYERS, resident=RESIDENT
    )
    opened.append(paged)
    paged.load_residents()
    for step in range(NUM_LAYERS + 2):
        if step % 2:
            paged.block(step)
        else:
            move(paged, step, num_pages, has_staging=False)
        assert_step_is_there(paged, step)
        if step:
            assert_step_is_there(paged, step - 1)


def test_a_block_comes_straight_from_below_past_the_staging_buffer(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    _, paged = over_dram(records, opened, num_slots=1, has_staging=True)
    paged.block(2)
    assert_step_is_there(paged, 2)


def test_the_third_step_takes_the_half_of_the_first_and_a_half_page_is_no_weight(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    _, paged = over_dram(records, opened, num_slots=1, resident=())
    paged.block(0)
    paged.block(1)
    paged.page(2, 0, 2)
    assert_step_is_there(paged, 1)
    for step in (0, 2):
        with pytest.raises(AssertionError, match=f"weights of step {step} are not there"):
            paged.tensors(step, 0)
    paged.page(2, 1, 2)
    assert_step_is_there(paged, 2)


def test_a_layer_is_in_both_halves_where_no_other_has_experts(
    tmp_path: Path, opened: list[ReadAhead | PagedExperts]
) -> None:
    records = write_experts(tmp_path, KEYS[:NUM_EXPERTS])
    paged = PagedExperts(FilePages(records), DeviceMemory(CPU, 2**24), records, num_layers=1)
    opened.append(paged)
    for step in range(4):
        paged.block(step)
        assert_step_is_there(paged, step, num_layers=1)
        if step:
            assert_step_is_there(paged, step - 1, num_layers=1)
            held = paged.tensors(step, 0)[0].data_ptr(), paged.tensors(step - 1, 0)[0].data_ptr()
            assert held[0] != held[1]


@pytest.mark.parametrize("num_pages", PAGES)
def test_pages_are_of_equal_bytes_and_leave_nothing_out(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts], num_pages: int
) -> None:
    dram = ReadAhead(ExpertStore(records, num_slots=1))
    opened.append(dram)
    source = MemoryPages(dram.store, dram.sleep)
    cut = PageCut(source, records, RESIDENT)
    for layer in range(NUM_LAYERS):
        pages = [cut.page(layer, number, num_pages) for number in range(num_pages)]
        keys = [key for key in KEYS if key.layer == layer and key not in RESIDENT]
        assert sum(page.num_bytes for page in pages) == len(keys) * source.slot_bytes
        for slot, key in enumerate(keys):
            end = 0
            for part in (part for page in pages for part in page.parts if part.key == key):
                assert (part.slot, part.start) == (slot, end)
                end += part.num_bytes
            assert end == source.slot_bytes
        mean = len(keys) * source.slot_bytes / num_pages
        assert all(abs(page.num_bytes - mean) < 256 for page in pages[:-1] if page.num_bytes)


@pytest.mark.parametrize("num_pages", PAGES)
def test_pages_of_another_number_are_staged_elsewhere_whatever_the_layer(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts], num_pages: int
) -> None:
    dram = ReadAhead(ExpertStore(records, num_slots=1))
    opened.append(dram)
    cut = PageCut(MemoryPages(dram.store, dram.sleep), records, RESIDENT)
    pages = [
        [cut.page(layer, number, num_pages) for layer in range(NUM_LAYERS)]
        for number in range(num_pages)
    ]
    ends = [max(page.buffer_start + page.num_bytes for page in layers) for layers in pages]
    starts = [min(page.buffer_start for page in layers) for layers in pages]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= cut.largest_bytes + 256 * num_pages


def test_no_staging_buffer_is_staged_into_when_there_is_none(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    _, paged = over_dram(records, opened, num_slots=1)
    with pytest.raises(AssertionError, match="no staging buffer"):
        paged.stage(0, 0, 1)


def test_staging_is_ahead_of_the_pages_that_go_up(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    _, paged = over_dram(records, opened, num_slots=1, has_staging=True)
    for page in range(3):
        paged.stage(1, page, 3)
    for page in range(3):
        paged.page(1, page, 3)
        if page < 2:
            paged.stage(2, page, 3)
    assert_step_is_there(paged, 1)


def test_both_halves_and_residents_are_part_of_the_capacity(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    dram = ReadAhead(ExpertStore(records, num_slots=1))
    opened.append(dram)
    source = MemoryPages(dram.store, dram.sleep)
    room = (2 * PageCut(source, KEYS, RESIDENT).most_keys + len(RESIDENT)) * source.slot_bytes
    memory = DeviceMemory(CPU, room + 2 * 512)
    PagedExperts(source, memory, KEYS, num_layers=NUM_LAYERS, resident=RESIDENT)
    assert room <= memory.used_bytes
    with pytest.raises(DoesNotFit, match="expert slots take"):
        memory = DeviceMemory(CPU, room - 512)
        PagedExperts(source, memory, KEYS, num_layers=NUM_LAYERS, resident=RESIDENT)


def test_room_is_twice_the_layer_that_streams_most(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    dram = ReadAhead(ExpertStore(records, num_slots=1))
    opened.append(dram)
    source = MemoryPages(dram.store, dram.sleep)
    for resident in ([], [key for key in KEYS if key.expert == 0], KEYS):
        most = NUM_EXPERTS - len(resident) // NUM_LAYERS
        assert PageCut(source, KEYS, resident).most_keys == most


def test_everything_resident_moves_nothing(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    dram, paged = over_dram(records, opened, num_slots=0, resident=KEYS, has_staging=True)
    for step in range(3):
        assert move(paged, step, 2, has_staging=True) == 0
        assert_step_is_there(paged, step)
    assert dram.statistics.num_bytes == 0


def test_after_a_pass_that_was_given_up_the_next_one_begins_anew(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    dram, paged = over_dram(records, opened, num_slots=1, has_staging=True)
    move(paged, 0, 2, has_staging=True)
    paged.stage(1, 0, 3)  # ends within an expert, which is in use below
    paged.forget()
    dram.forget_required()
    for step in (0, 1):
        move(paged, step, 3, has_staging=True)
        assert_step_is_there(paged, step)


def test_a_reader_that_fails_fails_whoever_stages(
    records: dict[ExpertKey, Record],
    opened: list[ReadAhead | PagedExperts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, paged = over_dram(records, opened, num_slots=1, has_staging=True)

    def fail(self: DirectFile, target: memoryview, offset: int) -> None:
        raise StorageError("disk broke")

    monkeypatch.setattr(DirectFile, "read", fail)
    with pytest.raises(StorageError, match="disk broke"):
        for page in range(3):
            paged.stage(0, page, 3)


def test_another_thread_may_require_other_layers_from_the_same_slot_meanwhile(
    records: dict[ExpertKey, Record], opened: list[ReadAhead | PagedExperts]
) -> None:
    dram, paged = over_dram(records, opened, num_slots=1, resident=())

    def walk(layers: range) -> int:
        seen = 0
        for layer in layers:
            for expert, tensors in dram.require(layer, range(NUM_EXPERTS)):
                assert_is(ExpertKey(layer, expert), tensors)
                seen += 1
        return seen

    with ThreadPoolExecutor(1) as pool:
        walked = pool.submit(walk, range(2, NUM_LAYERS))
        for step in range(2):
            move(paged, step, 3, has_staging=False)
            assert_step_is_there(paged, step)
        assert walked.result(10) == (NUM_LAYERS - 2) * NUM_EXPERTS
