"""Reading rows: every kind of file, every way it can be damaged, and constant memory."""

import datetime
import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import InputError, StorageError
from moebatch.rows import lines
from moebatch.rows.row import Base64, RawRow
from moebatch.rows.source import open_source
from moebatch.spec.request import RowError


def rows_of(path: Path) -> list[RawRow]:
    return list(open_source(path))


def contents(path: Path) -> list[object]:
    return [row.content for row in rows_of(path)]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


class TestLines:
    def test_indices_and_line_numbers(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", b"one\n\n  \r\ntwo\r\nthree")
        assert [(row.index, row.line, row.content) for row in rows_of(path)] == [
            (0, 1, b"one"),
            (1, 4, b"two"),
            (2, 5, b"three"),
        ]

    def test_only_newlines_end_lines(self, tmp_path: Path) -> None:
        line = "a\u2028b\u0085c\x0bd\re".encode()
        assert contents(write(tmp_path / "a.jsonl", line + b"\n")) == [line]

    def test_byte_order_mark(self, tmp_path: Path) -> None:
        assert contents(write(tmp_path / "a.jsonl", b"\xef\xbb\xbf{}\n{}")) == [b"{}", b"{}"]

    @pytest.mark.parametrize("data", [b"", b"\n\n", b"  \n\t\r\n", b"\xef\xbb\xbf"])
    def test_no_rows(self, tmp_path: Path, data: bytes) -> None:
        assert contents(write(tmp_path / "a.jsonl", data)) == []

    def test_any_name(self, tmp_path: Path) -> None:
        for name in ("a.ndjson", "a.json", "a"):
            assert contents(write(tmp_path / name, b"{}")) == [b"{}"]

    def test_iterated_twice(self, tmp_path: Path) -> None:
        source = open_source(write(tmp_path / "a.jsonl", b"1\n2\n"))
        assert list(source) == list(source)

    def test_changed_in_between(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", b"1\n2\n")
        source = open_source(path)
        list(source)
        path.write_bytes(b"1\n2\n3\n")
        with pytest.raises(InputError, match="was changed while the job ran"):
            list(source)

    def test_line_beyond_the_bound(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
        data = b"a\n" + b"x" * 300_000 + b"\nb\n" + b"y" * 99 + b"\n" + b"z" * 100
        first, long, second, fits, last = rows_of(write(tmp_path / "a.jsonl", data))
        assert (first.content, second.content, second.line) == (b"a", b"b", 3)
        assert (fits.content, last.content) == (b"y" * 99, b"z" * 100)
        assert isinstance(long.content, RowError)
        assert long.content.code == "invalid_json_line"
        assert long.content.message == (
            "the line is longer than 100 B, the most that is read as one row; shorten it, or "
            "divide it into several rows"
        )

    @pytest.mark.parametrize("length", range(97, 104))
    def test_the_row_behind_a_line_at_the_limit_is_not_lost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
    ) -> None:
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
        path = write(tmp_path / "a.jsonl", b"x" * length + b"\nb\n")
        first, second = rows_of(path)
        assert second.content == b"b"
        assert isinstance(first.content, RowError) == (length > 100)

    @given(st.binary(max_size=300))
    def test_any_bytes(self, tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
        path = write(tmp_path_factory.mktemp("any") / "a.jsonl", b"x\n" + data)
        expected = [line for line in data.split(b"\n") if line.strip()]
        assert contents(path)[1:] == [line.removesuffix(b"\r") for line in expected]


class TestCompressed:
    def test_gzip_by_content(self, tmp_path: Path) -> None:
        for name in ("a.jsonl.gz", "a.jsonl"):
            assert contents(write(tmp_path / name, gzip.compress(b"1\n2"))) == [b"1", b"2"]

    def test_several_members(self, tmp_path: Path) -> None:
        data = gzip.compress(b"1\n") + gzip.compress(b"2\n")
        assert contents(write(tmp_path / "a.gz", data)) == [b"1", b"2"]

    def test_zstd(self, tmp_path: Path) -> None:
        import pyarrow

        data = pyarrow.compress(b"1\n2\n" * 1000, codec="zstd", asbytes=True)
        assert contents(write(tmp_path / "a.jsonl.zst", data)) == [b"1", b"2"] * 1000
        passed_over = b"\x50\x2a\x4d\x18\x04\0\0\0size"  # as pzstd begins
        found = contents(write(tmp_path / "b.jsonl.zst", passed_over + data))
        assert found == [b"1", b"2"] * 1000

    def test_empty_gzip_file(self, tmp_path: Path) -> None:
        assert contents(write(tmp_path / "a.gz", b"")) == []

    @pytest.mark.parametrize("cut", [20, 2000, 4000])
    def test_truncated(self, tmp_path: Path, cut: int) -> None:
        rows = b"".join(os.urandom(16).hex().encode() + b"\n" for _ in range(2000))
        data = gzip.compress(rows)
        source = open_source(write(tmp_path / "a.jsonl.gz", data[:cut]))
        good = []
        with pytest.raises(InputError, match="the compressed data ends early, be") as caught:
            for row in source:
                good.append(row.content)
        place = f"behind line {len(good)}" if good else "before any row can be read"
        assert str(caught.value).endswith(f" ends early, {place}; get the file again")
        assert good == rows.split(b"\n")[: len(good)]
        assert cut < 2000 or good

    def test_garbage_inside(self, tmp_path: Path) -> None:
        data = bytearray(gzip.compress(os.urandom(10_000).hex().encode()))
        data[500:600] = b"\xff" * 100
        with pytest.raises(
            InputError, match=r"is damaged before any row can be read: .*; get the file again"
        ):
            rows_of(write(tmp_path / "a.jsonl.gz", bytes(data)))

    def test_half_of_a_zstd_file_ends_early(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        data = pyarrow.compress(os.urandom(5000), codec="zstd", asbytes=True)
        path = write(tmp_path / "a.jsonl.zst", data[:-100])
        with pytest.raises(
            InputError, match="ends early, before any row can be read; get the file"
        ):
            rows_of(path)

    @pytest.mark.parametrize("suffix", ["gz", "zst"])
    def test_only_called_so(self, tmp_path: Path, suffix: str) -> None:
        with pytest.raises(InputError, match=f"is not {suffix} data although its name says so"):
            rows_of(write(tmp_path / f"a.jsonl.{suffix}", b"{}\n"))


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "data", "message"),
        [
            ("a.xlsx", b"PK", ".xlsx files are not supported; supported are JSON lines"),
            ("a.parquet", b"{}", "is not a parquet file although its name says so"),
            ("a.jsonl", b"\xff\xfe{\0}\0", "is UTF-16 or UTF-32; save it as UTF-8"),
            ("a.jsonl", b"\xfe\xff\0{\0}", "is UTF-16 or UTF-32; save it as UTF-8"),
            ("a.json", b'[{"prompt": 1}]', "is a JSON array; JSON lines are needed"),
            ("a.jsonl", b"\xef\xbb\xbf [\n", "is a JSON array"),
            ("a.jsonl", b'{\n  "prompt": 1\n}\n', "has a JSON object over several lines"),
            ("a b.jsonl", b"\xef\xbb\xbf{ \r\n", "a b.jsonl' > rows.jsonl makes them)"),
            ("a.parquet", b"PAR1garbage", "the data cannot be read behind row 0: "),
        ],
    )
    def test_other_kinds(self, tmp_path: Path, name: str, data: bytes, message: str) -> None:
        with pytest.raises(InputError) as caught:
            rows_of(write(tmp_path / name, data))
        assert message in str(caught.value)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no such file; check input\.path in the job file"):
            open_source(tmp_path / "nowhere.jsonl")

    def test_in_a_folder_that_may_not_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "is_dir", refuse)
        with pytest.raises(InputError, match=r"in\.jsonl: cannot be read: Permission denied"):
            open_source(tmp_path / "in.jsonl")

    def test_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InputError, match="is no regular file"):
            open_source(tmp_path / "pipe")

    def test_gone_later(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", b"1\n")
        source = open_source(path)
        path.unlink()
        with pytest.raises(StorageError, match="reading failed: No such file"):
            list(source)

    def test_other_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is a folder, but not one saved by datasets"):
            open_source(tmp_path)

    def test_folder_of_splits(self, tmp_path: Path) -> None:
        write(tmp_path / "dataset_dict.json", b'{"splits": ["train", "test"]}')
        with pytest.raises(InputError, match=r"several splits \(train, test\); choose one, such"):
            open_source(tmp_path)

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (b"", "does not name the files"),
            (b"[]", "does not name the files"),
            (b'{"_data_files": [{"filename": "../../etc/passwd"}]}', "a file outside the folder"),
            (b'{"_data_files": [{"filename": 3}]}', "a file outside the folder"),
            (b'{"_data_files": [{"filename": "gone.arrow"}]}', "a file is missing"),
            (b'{"_data_files": [], "_indices_data_files": [1]}', "has an indices mapping"),
        ],
    )
    def test_damaged_dataset(self, tmp_path: Path, state: bytes, message: str) -> None:
        write(tmp_path / "state.json", state)
        with pytest.raises(InputError, match=message):
            rows_of(tmp_path)


class TestTables:
    ROWS = (
        {"prompt": "a", "n": 1, "score": 0.5, "tags": ["x"]},
        {"prompt": "ü", "n": None, "score": float("nan"), "tags": []},
    )
    PLAIN = (ROWS[0], {"prompt": "ü", "n": None, "score": None, "tags": []})

    def test_parquet(self, tmp_path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(self.ROWS) * 100), path)
        found = rows_of(path)
        assert [row.content for row in found] == list(self.PLAIN) * 100
        assert [(row.index, row.line) for row in found[:2]] == [(0, None), (1, None)]
        assert len(rows_of(path.rename(tmp_path / "no-suffix"))) == 200

    def test_a_table_that_was_replaced_meanwhile_is_not_read_on(self, tmp_path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(self.ROWS)), path)
        source = open_source(path)
        assert len(list(source)) == len(list(source)) == 2
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(self.ROWS) * 2), path)
        with pytest.raises(InputError, match="was changed while the job ran"):
            list(source)

    def test_values_beyond_json(self, tmp_path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "a.parquet"
        row = {"day": datetime.date(2026, 1, 2), "raw": b"ab", "far": float("inf")}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        found = contents(path)
        assert found == [{"day": "2026-01-02", "raw": "YWI=", "far": None}]
        assert isinstance(found[0], dict) and isinstance(found[0]["raw"], Base64)

    def test_saved_dataset(self, tmp_path: Path) -> None:
        import pyarrow

        folder = tmp_path / "saved"
        folder.mkdir()
        table = pyarrow.Table.from_pylist(list(self.ROWS) * 100)
        for name in ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow"):
            with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
                stream.write_table(table)
        files = [{"filename": name.name} for name in sorted(folder.iterdir())]
        write(folder / "state.json", json.dumps({"_data_files": files}).encode())
        source = open_source(folder)
        found = list(source)
        assert [row.content for row in found] == list(self.PLAIN) * 200
        assert found[-1].index == 399
        os.utime(folder / "data-00001-of-00002.arrow", ns=(0, 0))
        with pytest.raises(InputError, match="was changed while the job ran"):
            list(source)

    def test_an_arrow_file_cut_short_between_batches_is_not_a_whole_one(
        self, tmp_path: Path
    ) -> None:
        import pyarrow

        file, table = tmp_path / "a.arrow", pyarrow.Table.from_pylist([{"prompt": "a"}])
        with (
            pyarrow.OSFile(str(file), "wb") as data,
            pyarrow.ipc.new_stream(data, table.schema) as stream,
        ):
            stream.write_table(table)
            between = data.tell()
            stream.write_table(table)
        write(tmp_path / "state.json", b'{"_data_files": [{"filename": "a.arrow"}]}')
        assert len(rows_of(tmp_path)) == 2
        os.truncate(file, between)
        with pytest.raises(InputError, match=r"'a\.arrow' is truncated"):
            rows_of(tmp_path)

    def test_columns_of_the_same_name_are_refused(self, tmp_path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        columns = [pyarrow.array([text]) for text in ("a", "b", "c")]
        table = pyarrow.Table.from_arrays(columns, names=["prompt", "x", "prompt"])
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(InputError, match="has 2 columns named 'prompt'"):
            rows_of(tmp_path / "a.parquet")

    def test_checksums_of_parquet_pages_are_compared(self, tmp_path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(
            pyarrow.table({"prompt": ["What is six times seven?"]}),
            path,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
        write(path, path.read_bytes().replace(b"seven", b"eight"))
        with pytest.raises(InputError, match="the data cannot be read behind row 0"):
            rows_of(path)

    def test_damaged_arrow_file(self, tmp_path: Path) -> None:
        write(tmp_path / "state.json", b'{"_data_files": [{"filename": "a.arrow"}]}')
        write(tmp_path / "a.arrow", b"garbage" * 10)
        with pytest.raises(InputError, match="the data cannot be read behind row 0"):
            rows_of(tmp_path)


@pytest.mark.slow
def test_folder_written_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(list(TestTables.ROWS)).save_to_disk(tmp_path / "saved")
    assert contents(tmp_path / "saved") == list(TestTables.PLAIN)


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"prompt": "hello"}\n' * 200_000, 1))
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_source(path)) == 200_000
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()


class TestHostileTables:
    """Files of which the library says almost anything."""

    def parquet(self, path: Path, **columns: object) -> Path:
        parquet, table = (
            pytest.importorskip("pyarrow.parquet"),
            pytest.importorskip("pyarrow").table,
        )
        parquet.write_table(table(columns), path)
        return path

    @pytest.mark.parametrize("start", [-60, -100, 4])
    def test_damage_anywhere_is_damaged_input(self, tmp_path: Path, start: int) -> None:
        path = self.parquet(tmp_path / "a.parquet", prompt=["a", "b"])
        data = bytearray(path.read_bytes())
        place = start % len(data)
        data[place : place + 40] = b"\xff" * 40
        path.write_bytes(data)
        with pytest.raises(InputError, match="the data cannot be read behind row 0: "):
            rows_of(path)

    def test_a_time_beyond_python_is_a_message(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        late = pyarrow.array([2**62], pyarrow.timestamp("us"))
        path = self.parquet(tmp_path / "a.parquet", prompt=["a"], when=late)
        with pytest.raises(InputError, match="the data cannot be read behind row 0: "):
            rows_of(path)

    def test_a_pipe_in_a_dataset_is_not_waited_for(self, tmp_path: Path) -> None:
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "x"}]}')
        os.mkfifo(tmp_path / "x")
        with pytest.raises(InputError, match="'x' is no regular file"):
            rows_of(tmp_path)
