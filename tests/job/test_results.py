"""Writing the output: order, splitting, replacing in one step, full disks and locked folders."""

import errno
import gzip
import json
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError, LockHeld, StorageError
from moebatch.job.output_path import require_writable, run_folder
from moebatch.job.results import ResultFile
from moebatch.spec.job import Job


def write(path: Path, order: list[int], *, failed: set[int] = frozenset(), **options: Any) -> None:
    with ResultFile(path, num_rows=len(order), **options) as results:
        for index in order:
            results.add(index, b'{"row":%d}' % index, failed=index in failed)
        assert (results.num_done, results.num_failed) == (len(order), len(failed))
        results.finish()


def rows(path: Path) -> list[int]:
    return [json.loads(line)["row"] for line in path.read_bytes().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(st.permutations(range(12)))
def test_order_of_the_input(tmp_path_factory: pytest.TempPathFactory, order: list[int]) -> None:
    folder = tmp_path_factory.mktemp("order")
    write(folder / "out.jsonl", order)
    assert rows(folder / "out.jsonl") == list(range(12))
    assert names(folder) == ["out.jsonl"]


def test_nothing_in_place_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old\n")
    with ResultFile(path, num_rows=1) as results:
        results.add(0, b'{"row":0}', failed=False)
        assert path.read_bytes() == b"old\n"
        records = (run_folder(path) / "records.jsonl").read_bytes()
        assert json.loads(records) == {"index": 0, "failed": False, "line": {"row": 0}}
        results.finish()
    assert path.read_bytes() == b'{"row":0}\n'


def test_interrupted_run_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), ResultFile(path, num_rows=2) as results:
        results.add(1, b'{"row":1}', failed=False)
        raise KeyboardInterrupt
    assert (run_folder(path) / "records.jsonl").read_bytes().count(b"\n") == 1
    assert not path.exists()
    write(path, [1, 0])
    assert rows(path) == [0, 1]


def test_failed_rows_apart(tmp_path: Path) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    write(path, [2, 1, 0, 3], failed={1, 3}, errors=errors)
    assert (rows(path), rows(errors)) == ([0, 2], [1, 3])
    write(path, [0], errors=errors)
    assert (rows(path), rows(errors)) == ([0], [])


def test_failed_rows_among_the_others(tmp_path: Path) -> None:
    write(tmp_path / "out.jsonl", [1, 0], failed={1})
    assert rows(tmp_path / "out.jsonl") == [0, 1]


def test_compressed_and_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl.gz", [1, 0, 2])
    first = (tmp_path / "a.jsonl.gz").read_bytes()
    assert gzip.decompress(first) == b'{"row":0}\n{"row":1}\n{"row":2}\n'
    assert first == (tmp_path / "b.jsonl.gz").read_bytes()


def test_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "out.jsonl", [0])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.jsonl").stat().st_mode) == 0o640


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "real" / "out.jsonl")
    write(tmp_path / "out.jsonl", [0])
    assert (tmp_path / "out.jsonl").is_symlink()
    assert rows(tmp_path / "real" / "out.jsonl") == [0]


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, num_rows=1) as first:
        first.add(0, b'{"row":0}', failed=False)
        with pytest.raises(LockHeld, match="another run is writing this output"):
            ResultFile(path, num_rows=1)
        first.finish()
    assert rows(path) == [0]


def test_row_twice_and_rows_missing_are_our_mistakes(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out.jsonl", num_rows=2) as results:
        results.add(0, b"{}", failed=False)
        with pytest.raises(AssertionError, match="row 0 has finished twice"):
            results.add(0, b"{}", failed=False)
        with pytest.raises(AssertionError, match="rows are missing"):
            results.finish()


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_disk_full_while_adding(tmp_path: Path) -> None:
    with (
        ResultFile(tmp_path / "out.jsonl", num_rows=1) as results,
        Path("/dev/full").open("ab", buffering=0) as device,
    ):
        os.dup2(device.fileno(), results._records.fileno())
        with pytest.raises(StorageError) as caught:
            results.add(0, b'{"row":0}', failed=False)
    message = str(caught.value)
    assert message.startswith(
        f"{run_folder(tmp_path / 'out.jsonl')}: no room left: 44 B (44 bytes)"
    )
    assert message.endswith("free; make room and run the job again")
    assert caught.value.exit_code == 74


def test_disk_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old\n")
    with ResultFile(path, num_rows=1) as results:
        results.add(0, b'{"row":0}', failed=False)
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match="no room left: 44 B"):
            results.finish()
    assert path.read_bytes() == b"old\n"
    assert names(tmp_path) == ["out.jsonl", "out.jsonl.moebatch"]


def test_other_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with ResultFile(tmp_path / "out.jsonl", num_rows=0) as results:
        monkeypatch.setattr("os.fsync", broken)
        with pytest.raises(StorageError, match="writing failed: Input/output error"):
            results.finish()


def test_memory_of_many_rows(tmp_path: Path) -> None:
    num_rows, line = 50_000, b'{"row":1}'
    with ResultFile(tmp_path / "out.jsonl", num_rows=num_rows) as results:
        for index in range(num_rows):
            results.add(num_rows - 1 - index, line, failed=False)
        tracemalloc.start()
        try:
            results.finish()
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


class TestPath:
    def message(self, tmp_path: Path, output: Path, errors: Path | None = None) -> str:
        sections = {
            "model": {"path": str(tmp_path / "model")},
            "input": {"path": str(tmp_path / "in.jsonl")},
            "output": {"path": str(output), "errors": errors and str(errors)},
        }
        with pytest.raises(ConfigError) as caught:
            require_writable(Job.model_validate(sections))
        return str(caught.value)

    def test_obstacles(self, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_bytes(b"{}")
        (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
        (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "in.jsonl")
        os.mkfifo(tmp_path / "pipe")
        for path, message in {
            tmp_path: "output.path: is a folder; give the path of a file",
            tmp_path / "pipe": "output.path: is no regular file",
            tmp_path / "gone" / "o.jsonl": "gone does not exist; make it first",
            tmp_path / "in.jsonl" / "o.jsonl": "in.jsonl is no folder",
            tmp_path / "o.parquet": "output.path: .parquet is not written; use .jsonl",
            tmp_path / "in.jsonl": "output.path: is the same as input.path; choose another",
            tmp_path / "link.jsonl": "output.path: is the same as input.path; choose another",
            tmp_path / "hard.jsonl": "output.path: is the same as input.path; choose another",
        }.items():
            assert message in self.message(tmp_path, path)

    def test_all_at_once(self, tmp_path: Path) -> None:
        found = self.message(tmp_path, tmp_path, tmp_path)
        assert "output.path: is a folder" in found
        assert "output.errors: is the same as output.path" in found

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_read_only_folder(self, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0o500)
        found = self.message(tmp_path, tmp_path / "locked" / "o.jsonl")
        assert "cannot be written to; check its permissions" in found
