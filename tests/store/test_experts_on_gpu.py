"""The same ways to the memory of a real GPU, where there is one."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from moebatch.engine.lanes.read_ahead import ReadAhead
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.experts.page_sources import MemoryPages
from moebatch.store.experts.paged import PagedExperts
from tests.store.expert_files import KEYS, NUM_EXPERTS, NUM_LAYERS, assert_is, write_experts
from tests.store.two_levels import TwoLevels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.mark.parametrize("pinned", [False, True])
def test_experts_arrive_whole(tmp_path: Path, pinned: bool) -> None:
    levels = TwoLevels(
        write_experts(tmp_path),
        dram_slots=2,
        vram_slots=2,
        in_dram=KEYS[:4],
        in_vram=KEYS[4:6],
        device=torch.device("cuda"),
        pinned=pinned,
    )
    with closing(levels):
        for step in range(2 * NUM_LAYERS):
            levels.prefetch(list(KEYS))
            levels.compute(step % NUM_LAYERS, list(range(NUM_EXPERTS)))


@pytest.mark.parametrize("has_staging", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_pages_arrive_whole(tmp_path: Path, has_staging: bool, pinned: bool) -> None:
    records = write_experts(tmp_path)
    dram = ExpertStore(records, num_slots=1, resident=KEYS[:4], pinned=pinned)
    reading = ReadAhead(dram)
    memory = DeviceMemory(torch.device("cuda"), 2**24)
    paged = PagedExperts(
        MemoryPages(dram, reading.sleep),
        memory,
        records,
        num_layers=NUM_LAYERS,
        resident=KEYS[4:6],
        has_staging=has_staging,
    )
    with closing(dram), closing(reading), closing(paged):
        paged.load_residents()
        for step in range(2 * NUM_LAYERS):
            for page in range(3):
                if has_staging:
                    paged.stage(step, page, 3)
                paged.page(step, page, 3)
            torch.cuda.synchronize()
            for expert in range(NUM_EXPERTS):
                assert_is(ExpertKey(step % NUM_LAYERS, expert), paged.tensors(step, expert))
