"""Reading through the store, writing, and leaving nothing behind."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.errors import ConfigError, StorageError
from moebatch.measure.disk import (
    DiskRates,
    ExpertStream,
    files_to_read,
    free_bytes,
    read_rates,
    reading_beside,
    scratch_file,
)
from tests.measure.sizes import TINY_DISK


def test_a_file_is_read_until_the_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 * TINY_DISK.extent_bytes + 100))
    rates = read_rates([path], TINY_DISK)
    assert all(rate > 0 for rate in rates.rates)
    least, most = rates.spread
    assert least <= rates.mean <= most


def test_one_extent_is_enough_to_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(TINY_DISK.extent_bytes))
    assert read_rates([path], replace(TINY_DISK, read_s=0.0)).rates


def test_files_too_short_to_tell_anything_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100))
    with pytest.raises(ConfigError, match="weights: too short to time; give a file of"):
        read_rates([path], TINY_DISK)


def test_a_chunk_that_the_readers_had_brought_before_counts_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on while other programs hold up what asks for them: of 0 B/s no profile was made."""
    path, size = tmp_path / "weights", TINY_DISK.extent_bytes
    path.write_bytes(bytes(size))
    progress = iter([(0, 0.0), (8 * size, 2.0), (8 * size, 3.0), (12 * size, 5.0)])
    monkeypatch.setattr(ExpertStream, "_progress", lambda _: next(progress))
    with closing(ExpertStream([path], size, TINY_DISK)) as stream:
        for _ in zip(range(3 * 4 + 1), stream.experts(), strict=False):
            pass
        assert stream.rates.rates == (8 * size / 2.0, 4 * size / 3.0)


def test_the_mean_is_over_the_time_of_all_chunks() -> None:
    rates = DiskRates(rates=(1.0, 4.0, 4.0), is_direct=True)
    assert rates.mean == 3 / (1 / 1.0 + 1 / 4.0 + 1 / 4.0)
    assert rates.spread == (1.0, 4.0)


def test_files_of_a_folder_come_large_ones_first(tmp_path: Path) -> None:
    for name, size in (("a", 1), ("b", 30), ("c", 30)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "folder").mkdir()
    assert [path.name for path in files_to_read(tmp_path)] == ["b", "c", "a"]
    assert files_to_read(tmp_path / "a") == [tmp_path / "a"]


@pytest.mark.parametrize("name", ["", "missing"])
def test_nothing_to_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no such file, and no folder with files"):
        files_to_read(tmp_path / name)


def test_the_written_file_is_read_and_then_gone(tmp_path: Path) -> None:
    with scratch_file(tmp_path, TINY_DISK) as (path, write):
        assert write > 0
        assert path.stat().st_size >= TINY_DISK.file_bytes
        assert len(set(path.read_bytes()[:4096])) > 100, "zeros may be compressed away"
        assert read_rates([path], TINY_DISK).rates
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_the_written_file_however_the_process_ends(tmp_path: Path) -> None:
    with scratch_file(tmp_path, TINY_DISK) as (path, _):
        assert path.stat().st_size >= TINY_DISK.file_bytes
        assert list(tmp_path.iterdir()) == [], "a signal would leave what has a name"


def test_the_written_file_is_gone_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_file(tmp_path, TINY_DISK) as (path, _):
        raise RuntimeError
    assert not path.exists(), "an open descriptor would keep its room"


def test_the_written_file_is_gone_when_writing_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(StorageError, match="No space left"), scratch_file(tmp_path, TINY_DISK):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"missing: No such file or directory; give a folder"),
        scratch_file(tmp_path / "missing", TINY_DISK),
    ):
        pass


def test_a_folder_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with (
        pytest.raises(StorageError, match=r"cannot be written: Read-only.*a file to read"),
        scratch_file(tmp_path, TINY_DISK),
    ):
        pass


def test_a_short_disk_says_what_to_do(tmp_path: Path) -> None:
    sizes = replace(TINY_DISK, extent_bytes=free_bytes(tmp_path))
    with (
        pytest.raises(StorageError, match=r"too little room.*give another folder"),
        scratch_file(tmp_path, sizes),
    ):
        pass


def test_reading_beside_adds_its_rates(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(3 * TINY_DISK.extent_bytes))
    rates: list[float] = []
    with reading_beside([path], TINY_DISK, rates):
        pass
    assert rates and all(rate > 0 for rate in rates)


def test_a_reader_beside_that_fails_is_not_silent(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with (
        pytest.raises(ConfigError, match="too short to time"),
        reading_beside([empty], TINY_DISK, []),
    ):
        pass


def test_noise_is_made_of_numbers_in_every_format(tmp_path: Path) -> None:
    """Random bits would hold values that some processors compute a hundred times slower."""
    with scratch_file(tmp_path, TINY_DISK) as (path, _):
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert data.view(dtype).isfinite().all()
