"""The scratch file of keys and values: what is written comes back, and a full disk is said."""

import errno
import fcntl
import os
import re
import resource
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.checkpoint.direct import DirectFile
from moebatch.errors import MoebatchError, OutOfMemory, StorageError
from moebatch.store import scratch_file
from moebatch.store.async_io import DEPTH, AsyncIO, Transfers
from moebatch.store.memory import Arena
from moebatch.store.scratch_file import LayerPages, PageRuns, ScratchFile

BLOCK, ODD = 4096, 96


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def allows_direct(folder: Path) -> bool:
    """Whether files of a folder may be read past the page cache."""
    (folder / "some").write_bytes(b"")
    with closing(DirectFile(folder / "some")) as file:
        return file.is_direct


@pytest.fixture(params=[True, False], ids=["at once", "one by one"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the system takes many transfers in one call."""
    if not request.param:
        one_by_one(monkeypatch)
    return bool(request.param)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(scratch_file, "AsyncIO", refuse)


def halves(arena: Arena, half_bytes: int, num_pages: int) -> list[Tensor]:
    """Keys and values of pages, the keys at one end of the memory and the values at the other."""
    values = num_pages * half_bytes
    return [
        arena.bytes[start : start + values].view(num_pages, half_bytes) for start in (0, values)
    ]


def run_of(first: int, num_pages: int) -> PageRuns:
    """Pages that follow each other in the file and in memory."""
    return PageRuns.of(np.arange(first, first + num_pages), np.arange(num_pages))


@pytest.mark.parametrize("half_bytes", [BLOCK, ODD])
def test_more_pages_than_one_call_takes_come_back(
    tmp_path: Path, at_once: bool, half_bytes: int
) -> None:
    num_pages = 700
    file = ScratchFile(tmp_path, [LayerPages(num_pages, [half_bytes] * 2)] * 2)
    written, read = (Arena(2 * num_pages * half_bytes) for _ in range(2))
    generator = np.random.default_rng(0)
    for layer in range(2):
        written.bytes.numpy()[:] = generator.integers(0, 256, written.num_bytes)
        file.write(layer, run_of(0, num_pages), halves(written, half_bytes, num_pages))
    file.read(1, run_of(0, num_pages), halves(read, half_bytes, num_pages))
    wanted = 2 * num_pages * half_bytes
    assert read.bytes[:wanted].equal(written.bytes[:wanted])
    file.close()


@pytest.mark.parametrize("half_bytes", [BLOCK, ODD])
@pytest.mark.parametrize("is_refused", [False, True])
def test_blocks_go_past_the_page_cache_where_the_system_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_bytes: int, is_refused: bool
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    if is_refused:  # as some file systems do
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    written, read = Arena(2 * half_bytes), Arena(2 * half_bytes)
    written.bytes.fill_(7)
    with closing(ScratchFile(tmp_path, [LayerPages(3, [half_bytes] * 2)])) as file:
        allows = not is_refused and allows_direct(tmp_path)
        assert file.is_direct == (allows and half_bytes == BLOCK)
        if not is_refused:
            flags = fcntl.fcntl(file._fd, fcntl.F_GETFL)
            assert bool(flags & os.O_DIRECT) == file.is_direct
        file.write(0, run_of(1, 1), halves(written, half_bytes, 1))
        file.read(0, run_of(1, 1), halves(read, half_bytes, 1))
    assert read.bytes[: 2 * half_bytes].eq(7).all()


@pytest.mark.parametrize("half_bytes", [BLOCK, ODD])
def test_what_is_moved_in_part_is_moved_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_bytes: int
) -> None:
    one_by_one(monkeypatch)
    file = ScratchFile(tmp_path, [LayerPages(3, [half_bytes] * 2)])
    written, read = (Arena(6 * half_bytes) for _ in range(2))
    written.bytes.numpy()[:] = np.random.default_rng(0).integers(0, 256, written.num_bytes)
    calls: list[str] = []
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)

        def one_buffer(
            descriptor: int,
            buffers: list[memoryview],
            offset: int,
            name: str = name,
            whole: Callable[..., int] = whole,
        ) -> int:
            """Past the page cache half a block more is said to be done: a block counts whole."""
            calls.append(name)
            more = BLOCK // 2 if file.is_direct and len(buffers) > 1 else 0
            return whole(descriptor, buffers[:1], offset) + more

        monkeypatch.setattr(os, name, one_buffer)
    file.write(0, run_of(0, 3), halves(written, half_bytes, 3))
    file.read(0, run_of(0, 3), halves(read, half_bytes, 3))
    assert read.bytes[: 6 * half_bytes].equal(written.bytes[: 6 * half_bytes])
    assert calls == ["pwritev"] * 6 + ["preadv"] * 6
    file.close()


def test_pages_are_where_they_belong(tmp_path: Path, at_once: bool) -> None:
    file = ScratchFile(tmp_path, [LayerPages(3, [BLOCK] * 2)] * 2)
    arena = Arena(2 * BLOCK)
    for layer in range(2):
        for page in (2, 0, 1):
            arena.bytes[:BLOCK], arena.bytes[BLOCK:] = 10 * layer + page, 100 + 10 * layer + page
            file.write(layer, run_of(page, 1), halves(arena, BLOCK, 1))
    read = Arena(4 * BLOCK)
    for layer in range(2):
        file.read(layer, run_of(1, 2), halves(read, BLOCK, 2))
        keys = [10 * layer + page for page in (1, 2)]
        assert read.bytes[::BLOCK].tolist() == [*keys, *(100 + key for key in keys)]
    file.close()


def test_nothing_is_left_in_the_folder_and_its_room_is_taken(tmp_path: Path) -> None:
    before = num_open_files()
    file = ScratchFile(tmp_path, [LayerPages(16, [BLOCK] * 2)] * 1)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file._fd).st_size == 2 * 16 * BLOCK
    assert os.fstat(file._fd).st_blocks * 512 >= 2 * 16 * BLOCK
    file.close()
    assert num_open_files() == before


def test_nothing_is_left_by_a_process_that_is_killed_while_it_takes_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []
    take = os.posix_fallocate

    def look_and_take(descriptor: int, start: int, num_bytes: int) -> None:
        seen.append(list(tmp_path.iterdir()))
        take(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", look_and_take)
    ScratchFile(tmp_path, [LayerPages(16, [BLOCK] * 2)] * 1).close()
    assert seen == [[]]


def test_a_disk_that_is_too_small_is_refused_with_need_and_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before others find it full."""

    def take(*arguments: object) -> None:
        raise AssertionError("it was to be looked at before")

    monkeypatch.setattr(os, "posix_fallocate", take)
    before = num_open_files()
    message = f"{re.escape(str(tmp_path))}: keys and values on disk need 1048576 TiB, .* are free"
    with pytest.raises(StorageError, match=message):
        ScratchFile(tmp_path, [LayerPages(2**47, [BLOCK] * 2)] * 1)
    assert list(tmp_path.iterdir()) == []
    assert num_open_files() == before


def test_a_system_that_refuses_the_room_is_quoted(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            ScratchFile(tmp_path, [LayerPages(16, [BLOCK] * 2)] * 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_pages_that_lie_apart_are_moved_at_once_each_to_its_place(
    tmp_path: Path, at_once: bool
) -> None:
    order, memory = [5, 0, 13, 2, 9, 7, 11], Arena(7 * BLOCK)
    pages = [memory.bytes[: 7 * BLOCK].view(7, BLOCK)]
    places = np.argsort(order)
    runs = PageRuns.of(np.sort(order), places)
    with closing(ScratchFile(tmp_path, [LayerPages(16, [BLOCK])])) as file:
        for place, page in enumerate(order):
            memory.bytes[place * BLOCK : (place + 1) * BLOCK] = 100 + page
        file.write(0, runs, pages)
        memory.bytes.zero_()
        file.read(0, runs, pages)
        assert memory.bytes[::BLOCK].tolist() == [100 + page for page in order]
        none = np.array([], np.int64)
        file.read(0, PageRuns.of(none, none), pages)


@pytest.mark.parametrize("half_bytes", [BLOCK, ODD])
@pytest.mark.parametrize("share", [0.0, 0.4, -1.0])
def test_what_the_system_leaves_undone_of_many_transfers_is_done_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_bytes: int, share: float
) -> None:
    run, num_done = AsyncIO.run, 0

    def leave(self: AsyncIO, file: int, way: int, transfers: Transfers) -> NDArray[np.int64]:
        """Only every third one is done in whole; others leave what is there, and fail."""
        nonlocal num_done
        kept = np.arange(len(transfers.offsets)) % 3 == 0
        buffers = transfers.buffers.reshape(len(kept), 2, 2)[kept].reshape(-1, 2)
        some = Transfers(buffers, transfers.num_buffers[kept], transfers.offsets[kept])
        done = np.full(len(kept), -errno.EIO if share < 0 else int(share * half_bytes))
        done[kept] = run(self, file, way, some)
        for number in np.flatnonzero(~kept & (done > 0)).tolist():
            first = transfers.buffers.reshape(len(kept), 2, 2)[number, :1].copy()
            first[0, 1] = done[number]
            part = Transfers(first, np.array([1]), transfers.offsets[number : number + 1])
            if file_is_direct:  # which takes no part of a block
                continue
            run(self, file, way, part)
        num_done += int(kept.sum())
        return done

    monkeypatch.setattr(AsyncIO, "run", leave)
    written, read = (Arena(2 * 7 * half_bytes) for _ in range(2))
    written.bytes.numpy()[:] = np.random.default_rng(0).integers(0, 256, written.num_bytes)
    runs = PageRuns.of(np.arange(0, 14, 2), np.arange(7))
    with closing(ScratchFile(tmp_path, [LayerPages(14, [half_bytes] * 2)])) as file:
        file_is_direct = file.is_direct
        file.write(0, runs, halves(written, half_bytes, 7))
        file.read(0, runs, halves(read, half_bytes, 7))
    assert read.bytes[: 14 * half_bytes].equal(written.bytes[: 14 * half_bytes])
    assert num_done == 6


def test_more_transfers_than_the_system_has_in_flight_are_all_done(tmp_path: Path) -> None:
    count = 3 * DEPTH + 1
    memory = Arena(count * BLOCK)
    pages = [memory.bytes[: count * BLOCK].view(count, BLOCK)]
    places = np.random.default_rng(0).permutation(count)
    runs = PageRuns.of(np.arange(0, 2 * count, 2), places)
    memory.bytes[::BLOCK] = torch.arange(count).remainder(251).to(torch.uint8)
    with closing(ScratchFile(tmp_path, [LayerPages(2 * count, [BLOCK])])) as file:
        file.write(0, runs, pages)
        memory.bytes.zero_()
        file.read(0, runs, pages)
    assert memory.bytes[::BLOCK].tolist() == [place % 251 for place in range(count)]


def test_nothing_is_in_flight_any_more_when_a_transfer_has_failed(
    tmp_path: Path, at_once: bool
) -> None:
    """Its memory may be given back then."""
    memory = Arena(4 * BLOCK)
    pages = [memory.bytes[: 4 * BLOCK].view(4, BLOCK)]
    memory.bytes.fill_(7)
    with closing(ScratchFile(tmp_path, [LayerPages(6, [BLOCK])])) as file:
        file.write(0, PageRuns.of(np.array([0, 2, 4]), np.array([0, 1, 2])), pages)
        memory.bytes.zero_()
        with pytest.raises(StorageError, match="reading keys and values came to an early end"):
            file.read(0, PageRuns.of(np.array([0, 2, 4, 6]), np.arange(4)), pages)
    assert memory.bytes[::BLOCK].tolist() == [7, 7, 7, 0]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone: keys and values cannot be kept there: No such"):
        ScratchFile(tmp_path / "gone", [LayerPages(1, [BLOCK] * 2)] * 1)


def test_reading_past_the_end_is_an_error(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, [LayerPages(1, [BLOCK] * 2)] * 1)
    with pytest.raises(StorageError, match="reading keys and values came to an early end"):
        file.read(0, run_of(1, 1), halves(Arena(2 * BLOCK), BLOCK, 1))
    file.close()


@pytest.mark.parametrize("doing", ["reading", "writing"])
@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, StorageError), (errno.ENOMEM, OutOfMemory)])
def test_what_the_system_says_of_a_transfer_is_quoted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    doing: str,
    code: int,
    kind: type[MoebatchError],
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    one_by_one(monkeypatch)
    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    message = f"{tmp_path}: {doing} keys and values failed: {os.strerror(code)}"
    with closing(ScratchFile(tmp_path, [LayerPages(1, [BLOCK] * 2)])) as file:
        transfer = file.read if doing == "reading" else file.write
        with pytest.raises(kind, match=re.escape(message)):
            transfer(0, run_of(0, 1), halves(Arena(2 * BLOCK), BLOCK, 1))
