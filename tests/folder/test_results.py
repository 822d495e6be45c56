"""Writing the output: order, splitting, replacing in one step, full disks and missing rows."""

import errno
import gzip
import json
import os
import stat
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError, StorageError
from moebatch.folder.duplicates import NO_DUPLICATES
from moebatch.folder.final_file import FinalFile, RowsMissing
from moebatch.folder.output_path import require_writable
from moebatch.folder.results import begun_from
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.journal.files import Files, replacing
from moebatch.journal.finished import Finished
from moebatch.journal.record import Record
from moebatch.journal.writer import JournalWriter
from moebatch.rows.row import Source
from moebatch.rows.source import open_source
from moebatch.spec.job import Job
from moebatch.spec.request import Begun


def source_of(path: Path, num_rows: int) -> Source:
    """An input of so many rows, beside the output."""
    text = "".join(json.dumps({"prompt": [row]}) + "\n" for row in range(num_rows))
    (path.parent / "in.jsonl").write_text(text)
    return open_source(path.parent / "in.jsonl")


def journal(path: Path, order: list[int], num_rows: int, failed: set[int] = frozenset()) -> Source:  # type: ignore[assignment]
    """Rows that ended in that order."""
    source = source_of(path, num_rows)
    keys = [RowKeys().all_of(raw).placed for raw in source]
    folder = RunFolder(path)
    folder.path.mkdir(exist_ok=True)
    with JournalWriter(folder.journal) as writer:
        for index in order:
            state = "fail" if index in failed else "done"
            writer.add(Record(keys[index], index, state, b'{"row":%d}' % index))  # type: ignore[arg-type]
    return source


def write(
    path: Path,
    order: list[int],
    *,
    failed: set[int] = frozenset(),  # type: ignore[assignment]
    errors: Path | None = None,
    files: Files | None = None,
    num_rows: int | None = None,
) -> tuple[int, int]:
    source = journal(path, order, num_rows or len(order), failed)
    with Finished(RunFolder(path).journal) as finished:
        return FinalFile(path, RowKeys(), errors=errors, files=files).write(
            source, finished, NO_DUPLICATES
        )


def rows(path: Path) -> list[int]:
    return [json.loads(line)["row"] for line in path.read_bytes().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(st.permutations(range(12)))
def test_order_of_the_input(tmp_path_factory: pytest.TempPathFactory, order: list[int]) -> None:
    folder = tmp_path_factory.mktemp("order")
    assert write(folder / "out.jsonl", order) == (12, 0)
    assert rows(folder / "out.jsonl") == list(range(12))
    assert names(folder) == ["in.jsonl", "out.jsonl", "out.jsonl.moebatch"]


def test_nothing_is_touched_while_rows_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old\n")
    with pytest.raises(RowsMissing) as caught:
        write(path, [2, 0], num_rows=4)
    assert (caught.value.num_missing, caught.value.missing[0].index) == (2, 1)
    assert path.read_bytes() == b"old\n"


def test_a_row_of_which_there_is_a_part_has_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    source = journal(path, [0, 2], 3)
    (key,) = [RowKeys().all_of(raw).placed for raw in source if raw.index == 1]
    with JournalWriter(RunFolder(path).journal) as writer:
        writer.add(Record(key, 1, "part", b"[]"))
    with Finished(RunFolder(path).journal) as finished, pytest.raises(RowsMissing) as caught:
        FinalFile(path, RowKeys()).write(source, finished, NO_DUPLICATES)
    assert [raw.index for raw in caught.value.missing] == [1]
    assert not path.exists()


def test_of_many_rows_that_are_missing_few_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RowsMissing) as caught:
        write(tmp_path / "out.jsonl", [9], num_rows=50)
    assert caught.value.num_missing == 49
    assert [raw.index for raw in caught.value.missing] == [0, 1, 2]


def test_what_was_begun_of_other_choices_is_left_aside() -> None:
    begun = Begun(tokens=(1, 2)), Begun(tokens=(3,))
    line = b'[{"tokens":[1,2],"logprobs":[]},{"tokens":[3],"logprobs":[]}]'
    assert begun_from(line, num_choices=2) == begun
    for other in (1, 3):
        assert begun_from(line, num_choices=other) == ()
    assert begun_from(b'{"text": "of a row that has ended"}', num_choices=1) == ()


def test_failed_rows_apart(tmp_path: Path) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    assert write(path, [2, 1, 0, 3], failed={1, 3}, errors=errors) == (4, 2)
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
    left = [tmp_path / "out.jsonl", *RunFolder(tmp_path / "out.jsonl").journal.iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in left} == {0o640}


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "real" / "out.jsonl")
    write(tmp_path / "out.jsonl", [0])
    assert (tmp_path / "out.jsonl").is_symlink()
    assert rows(tmp_path / "real" / "out.jsonl") == [0]


class Full(Files):
    """No room when the output is to reach the disk."""

    def sync(self, descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Broken(Files):
    def replace(self, source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("files", "message"), [(Full(), "no room left"), (Broken(), "failed: Input/output error")]
)
def test_an_output_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, files: Files, message: str
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old\n")
    with pytest.raises(StorageError, match=message) as caught:
        write(path, [0], files=files)
    assert caught.value.exit_code == 74
    assert path.read_bytes() == b"old\n"
    assert names(tmp_path) == ["in.jsonl", "out.jsonl", "out.jsonl.moebatch"]


class Sparing(Files):
    """Takes a part of what it is given."""

    most_bytes = 0

    def write(self, descriptor: int, data: bytes) -> int:
        self.most_bytes = max(self.most_bytes, len(data))
        return super().write(descriptor, data[:300_000])


def test_an_output_larger_than_what_is_written_at_once_is_whole(tmp_path: Path) -> None:
    files, lines = Sparing(), [b"%d" % number * 50_000 + b"\n" for number in range(60)]
    with replacing(files, tmp_path / "out.jsonl") as file:
        for line in lines:
            file.write(line)
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(lines)
    assert files.most_bytes < 2**21 < sum(map(len, lines))


def test_memory_of_many_rows(tmp_path: Path) -> None:
    num_rows, path = 20_000, tmp_path / "out.jsonl"
    source = journal(path, list(reversed(range(num_rows))), num_rows)
    with Finished(RunFolder(path).journal) as finished:
        tracemalloc.start()
        try:
            FinalFile(path, RowKeys()).write(source, finished, NO_DUPLICATES)
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
            tmp_path / ("o" * 240): "output.path: the name of the file has more than 239 bytes",
        }.items():
            assert message in self.message(tmp_path, path)

    def test_all_at_once(self, tmp_path: Path) -> None:
        found = self.message(tmp_path, tmp_path, tmp_path)
        assert "output.path: is a folder" in found
        assert "output.errors: is the same as output.path" in found

    @pytest.mark.parametrize("name", ["o.jsonl.moebatch", "o.jsonl.moebatch/bad.jsonl"])
    def test_failed_rows_do_not_go_where_the_job_keeps_its_own(
        self, tmp_path: Path, name: str
    ) -> None:
        """Not only once a run has made that folder, since then all rows have been answered."""
        (tmp_path / name).parent.mkdir(exist_ok=True)
        found = self.message(tmp_path, tmp_path / "o.jsonl", tmp_path / name)
        assert "output.errors: lies in" in found and "choose another" in found

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_read_only_folder(self, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0o500)
        found = self.message(tmp_path, tmp_path / "locked" / "o.jsonl")
        assert "cannot be written to; check its permissions" in found

    def test_read_only_file_system(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whose folders may well have permissions for everybody."""
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
        found = self.message(tmp_path, tmp_path / "o.jsonl")
        assert "is on a file system that is read-only" in found and "permissions" not in found
