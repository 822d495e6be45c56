"""A device has room for its capacity, and says so when it is asked for more."""

import pytest
import torch
from torch import Tensor

from moebatch.errors import DoesNotFit
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.memory import Arena

CPU = torch.device("cpu")


def test_what_is_handed_out_is_counted_and_zero() -> None:
    memory = DeviceMemory(CPU, 2**20)
    for shape, dtype in (((3, 5), torch.bfloat16), ((64, 64), torch.float32), ((0, 4), torch.int8)):
        tensor = memory.allocate(shape, dtype)
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.count_nonzero() == 0
    assert memory.used_bytes == 512 + 64 * 64 * 4


def test_large_tensors_begin_at_a_page_so_that_files_can_be_read_into_them() -> None:
    memory = DeviceMemory(CPU, 2**20)
    memory.allocate(100)
    assert memory.allocate(8192).data_ptr() % 4096 == 0


def test_more_than_the_capacity_is_refused_with_level_need_and_have() -> None:
    memory = DeviceMemory(CPU, 2**20)
    memory.allocate(768 * 2**10)
    with pytest.raises(DoesNotFit, match=r"experts take 512 KiB, but only 256 KiB of 1\.00 MiB"):
        memory.allocate(512 * 2**10, what="experts")
    assert memory.used_bytes == 768 * 2**10


def test_all_of_the_capacity_can_be_used() -> None:
    memory = DeviceMemory(CPU, 8192)
    memory.allocate(8192)
    assert memory.used_bytes == memory.capacity_bytes


def test_a_level_has_its_own_name_in_the_refusal() -> None:
    with pytest.raises(DoesNotFit, match=r"^dram: .*raise resources\.dram"):
        DeviceMemory(CPU, 0, level="dram").allocate(1)


def test_a_stop_is_heard_while_the_system_finds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take minutes, of a large arena."""
    touched: list[int] = []

    def touch_and_stop(part: Tensor) -> None:
        touched.append(part.nbytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(Tensor, "zero_", touch_and_stop)
    with pytest.raises(KeyboardInterrupt):
        Arena(2**30)
    assert sum(touched) < 2**28
