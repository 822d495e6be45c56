"""CSV and TSV inputs."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import InputError
from moebatch.rows.lines import MAX_LINE_BYTES
from moebatch.rows.row import RawRow
from moebatch.rows.separated import WRONG_CELLS
from moebatch.rows.source import open_source
from moebatch.spec.request import RowError


def read(path: Path, data: str | bytes) -> list[RawRow]:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return list(open_source(path))


def contents(path: Path, data: str | bytes) -> list[object]:
    return [row.content for row in read(path, data)]


def test_the_first_line_names_the_columns_and_cells_are_text(tmp_path: Path) -> None:
    data = 'id,question,"a, b"\n007,"Is ""x"" 1,5?",\n8,é,true\n'
    assert contents(tmp_path / "a.csv", data) == [
        {"id": "007", "question": 'Is "x" 1,5?', "a, b": ""},
        {"id": "8", "question": "é", "a, b": "true"},
    ]


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ";"), ("a.tsv", "\t"), ("A.CSV", ",")])
def test_the_first_line_says_what_is_between_cells(tmp_path: Path, name: str, mark: str) -> None:
    data = f"id{mark}prompt\n1{mark}.\n"
    assert contents(tmp_path / name, data) == [{"id": "1", "prompt": "."}]


@pytest.mark.parametrize(
    ("name", "first"),
    [("a.tsv", "prompt\tnote, if any"), ("a.csv", '"prompt";"a, b"'), ("a.csv", "\r\n\nprompt;b")],
)
def test_what_stands_in_the_name_of_a_column_is_not_between_cells(
    tmp_path: Path, name: str, first: str
) -> None:
    mark = "\t" if name == "a.tsv" else ";"
    (row,) = read(tmp_path / name, f"{first}\na, b{mark}.\n")
    assert isinstance(row.content, dict) and [*row.content.values()] == ["a, b", "."]
    assert row.line == 2 + first.count("\n")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_single_column_may_hold_whatever_stands_between_cells_elsewhere(
    tmp_path: Path, name: str
) -> None:
    cell = "a; b" if name == "a.csv" else "a, b; c"
    assert contents(tmp_path / name, f"prompt\n{cell}\n") == [{"prompt": cell}]


def test_cells_may_have_several_lines_and_rows_say_where_they_begin(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.csv", b'\xef\xbb\xbfprompt,x\r\n"a\r\nb\n",1\r\n\r\nc,2')
    assert [row.content for row in rows] == [
        {"prompt": "a\r\nb\n", "x": "1"},
        {"prompt": "c", "x": "2"},
    ]
    assert [(row.index, row.line) for row in rows] == [(0, 2), (1, 6)]


def test_parameters_and_messages_are_read_as_json(tmp_path: Path) -> None:
    data = (
        "prompt;max_tokens;temperature;stop;messages\n"
        '12;3;0.5;END;\n"{}";;;"[""a"",""b""]";"[{""role"": ""user""}]"\n'
    )
    assert contents(tmp_path / "a.csv", data) == [
        {"prompt": "12", "max_tokens": 3, "temperature": 0.5, "stop": "END", "messages": None},
        {
            "prompt": "{}",
            "max_tokens": None,
            "temperature": None,
            "stop": ["a", "b"],
            "messages": [{"role": "user"}],
        },
    ]


def test_a_row_with_too_many_or_too_few_cells_is_refused_and_no_other(tmp_path: Path) -> None:
    bad, good, short = contents(tmp_path / "a.csv", "a,b\n1,2,3\n1,2\n1\n")
    assert good == {"a": "1", "b": "2"}
    assert isinstance(bad, RowError) and isinstance(short, RowError)
    assert (bad.code, bad.message) == (
        WRONG_CELLS,
        "has 3 cells, the first line names 2 columns",
    )
    assert short.message == "has 1 cell, the first line names 2 columns"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'a,b\n1,2\n"x,3\n4,5\n', "a.csv:3: the row that begins here is no CSV: unexpected end"),
        (b'a,b\n"x"y,3\n', "a.csv:2: the row that begins here is no CSV: ',' expected after '\"'"),
        (b"a,b\r1,2\r", "a.csv:1: the row that begins here is no CSV: new-line character seen in"),
        (b"a,b\n1,\xe9\n", "a.csv:2: is not UTF-8 (byte 3 of the line); save it as UTF-8"),
        ("a,b\n".encode("utf-16"), "a.csv:1: is UTF-16 or UTF-32; save it as UTF-8"),
        (b"a,b,a\n", "has 2 columns named 'a'; give each a name of its own"),
        (b"a\n" + b"x" * (MAX_LINE_BYTES + 1), "a.csv:2: is longer than 16.0 MiB"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path / "a.csv", data)
    assert message in str(caught.value)
    assert "open the file" not in str(caught.value)


def test_prompts_may_be_longer_than_what_python_takes_as_a_cell(tmp_path: Path) -> None:
    for length in (300_000, MAX_LINE_BYTES - 1):
        long = "x" * length
        assert contents(tmp_path / "a.csv", f"a\n{long}\n") == [{"a": long}]


def test_a_byte_order_mark_is_one_at_the_beginning_only(tmp_path: Path) -> None:
    assert contents(tmp_path / "a.csv", "\ufeffa\n\ufeffx\n") == [{"a": "\ufeffx"}]


def test_compressed_files_and_files_without_rows(tmp_path: Path) -> None:
    assert contents(tmp_path / "a.csv.gz", gzip.compress(b"a\n1\n")) == [{"a": "1"}]
    assert contents(tmp_path / "b.csv", "") == contents(tmp_path / "c.csv", "a,b\n") == []


CELLS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.tuples(CELLS, CELLS.filter(bool)), max_size=6), st.sampled_from(",;\t"))
def test_rows_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], mark: str
) -> None:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=mark)
    writer.writerows([("left", "right"), *rows])
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    assert contents(path, out.getvalue()) == [
        {"left": left, "right": right} for left, right in rows
    ]
