"""The scratch file of keys and values: what is written comes back, and a full disk is said."""

import errno
import fcntl
import os
import re
import resource
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from moebatch.checkpoint.direct import DirectFile
from moebatch.errors import MoebatchError, OutOfMemory, StorageError
from moebatch.store.memory import Arena
from moebatch.store.scratch_file import LayerPages, PageRun, ScratchFile

BLOCK, ODD = 4096, 96


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def allows_direct(folder: Path) -> bool:
    """Whether files of a folder may be read past the page cache."""
    (folder / "some").write_bytes(b"")
    with closing(DirectFile(folder / "some")) as file:
        return file.is_direct


def halves(arena: Arena, half_bytes: int, num_pages: int) -> list[memoryview]:
    """Keys and values of pages, the keys at one end of the memory and the values at the other."""
    values = num_pages * half_bytes
    return [
        arena.view(start + page * half_bytes, half_bytes)
        for page in range(num_pages)
        for start in (0, values)
    ]


@pytest.mark.parametrize("half_bytes", [BLOCK, ODD])
def test_more_pages_than_one_call_takes_come_back(tmp_path: Path, half_bytes: int) -> None:
    num_pages = 700
    file = ScratchFile(tmp_path, [LayerPages(num_pages, [half_bytes] * 2)] * 2)
    written, read = (Arena(2 * num_pages * half_bytes) for _ in range(2))
    generator = np.random.default_rng(0)
    for layer in range(2):
        written.bytes.numpy()[:] = generator.integers(0, 256, written.num_bytes)
        file.write(layer, [PageRun(0, halves(written, half_bytes, num_pages))])
    file.read(1, [PageRun(0, halves(read, half_bytes, num_pages))])
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
        file.write(0, [PageRun(1, halves(written, half_bytes, 1))])
        file.read(0, [PageRun(1, halves(read, half_bytes, 1))])
    assert read.bytes[: 2 * half_bytes].eq(7).all()


@pytest.mark.parametrize("half_bytes", [BLOCK, ODD])
def test_what_is_moved_in_part_is_moved_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_bytes: int
) -> None:
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
    file.write(0, [PageRun(0, halves(written, half_bytes, 3))])
    file.read(0, [PageRun(0, halves(read, half_bytes, 3))])
    assert read.bytes[: 6 * half_bytes].equal(written.bytes[: 6 * half_bytes])
    assert calls == ["pwritev"] * 6 + ["preadv"] * 6
    file.close()


def test_pages_are_where_they_belong(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, [LayerPages(3, [BLOCK] * 2)] * 2)
    arena = Arena(2 * BLOCK)
    for layer in range(2):
        for page in (2, 0, 1):
            arena.bytes[:BLOCK], arena.bytes[BLOCK:] = 10 * layer + page, 100 + 10 * layer + page
            file.write(layer, [PageRun(page, halves(arena, BLOCK, 1))])
    read = Arena(4 * BLOCK)
    for layer in range(2):
        file.read(layer, [PageRun(1, halves(read, BLOCK, 2))])
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


def test_pages_that_lie_apart_are_moved_at_once_each_to_its_place(tmp_path: Path) -> None:
    order, memory = [5, 0, 13, 2, 9, 7, 11], Arena(7 * BLOCK)
    runs = [PageRun(page, [memory.view(n * BLOCK, BLOCK)]) for n, page in enumerate(order)]
    with closing(ScratchFile(tmp_path, [LayerPages(16, [BLOCK])])) as file:
        for place, page in enumerate(order):
            memory.bytes[place * BLOCK : (place + 1) * BLOCK] = 100 + page
        file.write(0, runs)
        memory.bytes.zero_()
        file.read(0, runs)
        assert memory.bytes[::BLOCK].tolist() == [100 + page for page in order]
        file.read(0, [])


def test_nothing_is_in_flight_any_more_when_a_transfer_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be given back then."""
    has_failed, num_ended = threading.Event(), 0

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal num_ended
        if offset == 0:
            has_failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        has_failed.wait()
        num_ended += 1
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", read)
    memory = Arena(4 * BLOCK)
    runs = [PageRun(page, [memory.view(page * BLOCK, BLOCK)]) for page in range(4)]
    with closing(ScratchFile(tmp_path, [LayerPages(4, [BLOCK])])) as file:
        with pytest.raises(StorageError, match="reading keys and values failed"):
            file.read(0, runs)
        assert num_ended == 3


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone: keys and values cannot be kept there: No such"):
        ScratchFile(tmp_path / "gone", [LayerPages(1, [BLOCK] * 2)] * 1)


def test_reading_past_the_end_is_an_error(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, [LayerPages(1, [BLOCK] * 2)] * 1)
    with pytest.raises(StorageError, match="reading keys and values came to an early end"):
        file.read(0, [PageRun(1, halves(Arena(2 * BLOCK), BLOCK, 1))])
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

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    message = f"{tmp_path}: {doing} keys and values failed: {os.strerror(code)}"
    with closing(ScratchFile(tmp_path, [LayerPages(1, [BLOCK] * 2)])) as file:
        transfer = file.read if doing == "reading" else file.write
        with pytest.raises(kind, match=re.escape(message)):
            transfer(0, [PageRun(0, halves(Arena(2 * BLOCK), BLOCK, 1))])
