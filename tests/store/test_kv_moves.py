"""Copying pages and rows: every unit arrives, whatever way it goes."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moebatch.store.kv import moves as kv_moves
from moebatch.store.kv.moves import Moves
from moebatch.store.memory import Arena, seen_from
from moebatch.store.scratch_file import PageRuns

NUM_UNITS = 40
places = st.lists(st.integers(0, NUM_UNITS - 1), unique=True, max_size=NUM_UNITS)


def stretched(starts: list[int], length: int) -> list[int]:
    """Distinct units, some of which follow each other."""
    units = [start + i for start in starts for i in range(length) if start + i < NUM_UNITS]
    return list(dict.fromkeys(units))


def pages_of(runs: PageRuns) -> list[int]:
    """Of a file, in the order of their places."""
    pairs = zip(runs.firsts.tolist(), runs.lengths.tolist(), strict=True)
    return [first + i for first, length in pairs for i in range(length)]


@given(places, places, st.integers(1, 8), st.integers(1, 8))
def test_each_unit_arrives_and_nothing_else_changes(
    sources: list[int], targets: list[int], source_length: int, target_length: int
) -> None:
    pairs = list(
        zip(stretched(sources, source_length), stretched(targets, target_length), strict=False)
    )
    source, target = torch.arange(2.0 * NUM_UNITS).view(-1, 2), torch.full((NUM_UNITS, 2), -1.0)
    moves = Moves.of([a for a, _ in pairs], [b for _, b in pairs])
    moves.copy(source, target)
    expected = torch.full((NUM_UNITS, 2), -1.0)
    for a, b in pairs:
        expected[b] = source[a]
    assert target.equal(expected)
    assert len(moves) == len(pairs)


@given(places, places, st.integers(1, 8), st.integers(1, 8))
def test_runs_are_all_of_the_moves_and_as_long_as_can_be(
    sources: list[int], targets: list[int], source_length: int, target_length: int
) -> None:
    pairs = list(
        zip(stretched(sources, source_length), stretched(targets, target_length), strict=False)
    )
    runs = Moves.of([a for a, _ in pairs], [b for _, b in pairs]).runs
    assert [(run.source + i, run.target + i) for run in runs for i in range(run.length)] == pairs
    for run, following in pairwise(runs):
        ends = run.source + run.length, run.target + run.length
        assert ends != (following.source, following.target)


@pytest.mark.parametrize("from_file", [True, False])
@given(places, places, st.integers(1, 8), st.integers(1, 8))
def test_a_file_is_gone_through_in_order_and_in_runs_as_long_as_can_be(
    from_file: bool, sources: list[int], targets: list[int], source_length: int, target_length: int
) -> None:
    pairs = list(
        zip(stretched(sources, source_length), stretched(targets, target_length), strict=False)
    )
    moves = Moves.of([a for a, _ in pairs], [b for _, b in pairs])
    runs = moves.file_runs(from_file=from_file)
    moved = list(zip(pages_of(runs), runs.places.tolist(), strict=True))
    assert moved == sorted(pairs if from_file else [(b, a) for a, b in pairs])
    assert all(runs.firsts[:-1] + runs.lengths[:-1] < runs.firsts[1:])


@given(st.lists(st.integers(0, 40), unique=True), st.integers(1, 5))
def test_runs_are_cut_to_what_one_call_takes(pages: list[int], most: int) -> None:
    runs = PageRuns.of(np.array(sorted(pages), np.int64), np.arange(len(pages)))
    cut = runs.cut(most)
    assert pages_of(cut) == pages_of(runs) == sorted(pages)
    assert all(cut.lengths <= most)
    assert cut.places is runs.places


def test_a_page_that_several_have_is_read_for_each_of_them() -> None:
    runs = Moves.of([4, 5, 4, 5], [0, 1, 2, 3]).file_runs(from_file=True)
    moved = sorted(zip(pages_of(runs), runs.places.tolist(), strict=True))
    assert moved == [(4, 0), (4, 2), (5, 1), (5, 3)]


class Recorded(TorchDispatchMode):
    """Operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sources = set[int]()
        """Units of what was gathered from."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func._schema.name.removeprefix("aten::")
        self.names.append(name)
        if name == "index_select":
            self.sources.add(len(args[0]))
        if name == "copy_" and args[1].device.type == "meta":
            return args[0]  # nothing is there to be copied
        return func(*args, **(kwargs or {}))

    @property
    def launched(self) -> list[str]:
        return [name for name in self.names if name in ("copy_", "index_select", "index_copy_")]


UP = ["index_select"]
DOWN = ["index_select", "index_copy_"]


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(("is_pinned", "width"), [(True, 8), (True, 7), (False, 8)])
def test_between_memories_one_kernel_takes_what_lies_scattered(
    monkeypatch: pytest.MonkeyPatch, is_up: bool, is_pinned: bool, width: int
) -> None:
    """The other device has no memory here: it only knows how much is moved."""

    def reach(device: torch.device, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor.to(device) if is_pinned else None

    monkeypatch.setattr(kv_moves, "seen_from", reach)
    units = list(range(0, 2 * NUM_UNITS, 2))
    here = torch.zeros(2 * NUM_UNITS, width)
    there = torch.zeros(3 * NUM_UNITS, width, device="meta")
    source, target = (here, there) if is_up else (there, here)
    placed = list(range(NUM_UNITS)) if is_up else units
    moves = Moves.of(units, placed)
    with Recorded() as recorded:
        for _ in range(2):
            moves.copy(source, target)
    once = (UP if is_up else DOWN) if is_pinned else ["copy_"] * NUM_UNITS
    assert recorded.launched == 2 * once
    assert recorded.sources == ({len(source)} if is_pinned else set())


def test_between_memories_long_runs_are_left_to_the_copy_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_moves, "seen_from", lambda device, tensor: tensor.to(device))
    here, there = (torch.zeros(64, 2**11, device=where) for where in ("cpu", "meta"))
    for length, expected in ((64, ["copy_"]), (8, ["index_select"])):
        moves = Moves.of(list(range(length)), list(range(length)))
        with Recorded() as recorded:
            moves.copy(here, there)
        assert recorded.launched == expected


def test_memory_that_is_not_pinned_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(memory: object, device: torch.device) -> None:
        raise RuntimeError("the specified pointer resides on host memory and is not registered")

    monkeypatch.setattr("torch.as_tensor", refuse)
    assert seen_from(torch.device("cuda", 0), torch.zeros(8)) is None


def test_pinned_memory_is_reached_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in a copy."""
    asked: list[dict[str, Any]] = []
    numbers = torch.arange(8.0).view(2, 4)

    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        asked.append(memory.__cuda_array_interface__)
        seen = numbers.view(-1).view(torch.uint8)
        return seen if len(asked) == 1 else seen.clone()

    monkeypatch.setattr("torch.as_tensor", as_tensor)
    seen = seen_from(torch.device("cuda", 0), numbers)
    assert seen is not None
    assert seen.equal(numbers)
    assert asked[0]["data"] == (numbers.data_ptr(), False)
    assert asked[0]["shape"] == (numbers.nbytes,)
    assert seen_from(torch.device("cuda", 0), numbers) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("width", [8, 9, 1024])
def test_a_gpu_moves_units_between_its_memory_and_pinned_memory(
    dtype: torch.dtype, width: int
) -> None:
    arena = Arena(2 * NUM_UNITS * width * dtype.itemsize, pinned=True)
    pinned = arena.tensor(0, (2 * NUM_UNITS, width), dtype)
    assert seen_from(torch.device("cuda", 0), pinned) is not None
    pinned.copy_(torch.randint(0, 100, pinned.shape).to(dtype))
    wanted, units = pinned.clone(), list(range(0, 2 * NUM_UNITS, 2))
    on_gpu = torch.zeros_like(pinned, device="cuda:0")
    Moves.of(units, list(range(NUM_UNITS))).copy(pinned, on_gpu)
    assert on_gpu[:NUM_UNITS].cpu().equal(wanted[::2])
    pinned.zero_()
    Moves.of(list(range(NUM_UNITS)), units).copy(on_gpu, pinned)
    torch.cuda.synchronize()
    assert pinned[::2].equal(wanted[::2])
    arena.unpin()
