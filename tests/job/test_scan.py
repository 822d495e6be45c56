"""The pass before the run: counts, faults of rows, faults of the whole file, memory."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from moebatch.errors import InputError
from moebatch.folder.shard import Shard
from moebatch.job import scan as scan_module
from moebatch.job.scan import Asked, InputSummary, scan
from moebatch.rows.parse import RowRules, parse_row
from moebatch.rows.row import FailedRow, ParsedRow, RawRow, ReadyRow, Row
from moebatch.rows.source import open_source
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Length, Workload

RULES = RowRules(answer_column="response")


def read(raw: RawRow, rules: RowRules = RULES) -> ParsedRow | FailedRow:
    return parse_row(raw, rules)


def summary(tmp_path: Path, *rows: Any, **options: Any) -> InputSummary:
    path = tmp_path / "in.jsonl"
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"\n".join(lines))
    rules = options.get("rules", RULES)
    return scan(open_source(path), lambda raw: read(raw, rules), Asked(**options))


def batch(name: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_counts(tmp_path: Path) -> None:
    found = summary(tmp_path, {"prompt": "a"}, b"", batch("x"), b"{", {"prompt": "b"})
    assert (found.num_rows, found.num_bad_rows, found.dialect) == (4, 1, "plain")
    assert found.first_chat is not None
    assert found.first_chat.place == "line 3"
    assert found.workload is None
    assert [(f.line, f.code) for f in found.faults] == [(4, "invalid_json_line")]
    found.require_usable()
    with pytest.raises(InputError, match=r"in\.jsonl:4: not JSON: Expecting property name"):
        found.require_usable(every_row=True)


def test_where_all_rows_have_to_be_good_and_are_nothing_is_said(tmp_path: Path) -> None:
    summary(tmp_path, {"prompt": "a"}).require_usable(every_row=True)


def test_of_faults_that_were_all_kept_none_are_said_to_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        summary(tmp_path, {"prompt": 5}, {"prompt": "a"}).require_usable(every_row=True)
    assert "more bad rows" not in str(caught.value)


def test_rows_that_cannot_be_read_are_written_as_the_first_one_that_can(tmp_path: Path) -> None:
    assert summary(tmp_path, b"{,", {"prompt": "a"}, batch("x")).dialect == "plain"
    assert summary(tmp_path, b"{,", batch("x"), {"prompt": "a"}).dialect == "openai"
    assert summary(tmp_path, b"{,").dialect == "openai"


def test_no_chat(tmp_path: Path) -> None:
    assert summary(tmp_path, {"prompt": "a"}).first_chat is None


@pytest.mark.parametrize("data", [b"", b"\n \r\n"])
def test_empty_file(tmp_path: Path, data: bytes) -> None:
    found = summary(tmp_path, data)
    assert [(f.line, f.code, f.message) for f in found.whole] == [
        (None, "empty_file", "holds no rows")
    ]
    with pytest.raises(InputError, match="holds no rows") as caught:
        found.require_usable()
    assert caught.value.exit_code == 4


def test_duplicates_name_both_lines(tmp_path: Path) -> None:
    rows = [batch("a"), batch("b"), b"", batch("a"), b"{", {"prompt": "x", "id": "b"}, batch("a")]
    found = summary(tmp_path, *rows)
    assert [(f.line, f.code, f.message) for f in found.faults if f.line != 5] == [
        (4, "duplicate_custom_id", "custom_id 'a' is already that of line 1"),
        (6, "duplicate_custom_id", "custom_id 'b' is already that of line 2"),
        (7, "duplicate_custom_id", "custom_id 'a' is already that of line 1"),
    ]
    assert (found.num_rows, found.num_bad_rows) == (6, 4)
    found.require_usable()


def test_equal_hashes_are_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "name_hash", lambda custom_id: 5)
    found = summary(tmp_path, batch("a"), batch("b"), batch("c"), batch("b"))
    assert [(fault.line, fault.message) for fault in found.faults] == [
        (4, "custom_id 'b' is already that of line 2")
    ]


NO_COLUMN = "input.prompt in the job file says which of them is the prompt"


def test_what_all_rows_lack_is_said_once_with_the_columns_that_there_are(tmp_path: Path) -> None:
    found = summary(tmp_path, *[{"id": i, "question": "Why?"} for i in range(50)])
    (fault,) = found.whole
    assert (fault.line, fault.code, found.faults, found.num_unlisted) == (1, "no_prompt", (), 0)
    assert "its columns are 'id', 'question'" in fault.message
    assert fault.message.endswith(f"{NO_COLUMN}; so it is with 50 of 50 rows")
    with pytest.raises(InputError):
        found.require_usable()


def test_other_faults_are_said_beside_what_most_rows_lack(tmp_path: Path) -> None:
    found = summary(tmp_path, {"id": 1, "question": "a"}, {"id": 2, "question": "b"}, b"{")
    assert [fault.message[-21:] for fault in found.whole] == ["it is with 2 of 3 rows"[-21:]]
    assert [fault.line for fault in found.faults] == [3]


def test_rows_of_tables_are_counted_from_1_in_names_and_errors(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None, "c"]}), path)
    found = scan(open_source(path), read)
    assert [(fault.where, fault.line) for fault in found.faults] == [("row 2", None)]
    assert found.num_unlisted == 0
    assert [read(raw).row.custom_id for raw in open_source(path)] == ["1", "2", "3"]


def test_what_some_rows_lack_is_their_own_fault(tmp_path: Path) -> None:
    found = summary(tmp_path, {"question": "Why?"}, {"prompt": "a"})
    assert (found.whole, [fault.line for fault in found.faults]) == ((), [1])
    assert found.faults[0].message.endswith(NO_COLUMN)


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{**batch(name), "body": {"model": "b"}} for name in "xy"], "model_mismatch"),
        ([b"{'prompt': 'a'}", b"a,b"], "invalid_json_line"),
    ],
)
def test_another_model_or_kind_of_file_is_said_once(
    tmp_path: Path, rows: list[Any], code: str
) -> None:
    found = summary(tmp_path, *rows, rules=RowRules(model_name="a"))
    assert [(fault.line, fault.code) for fault in found.whole] == [(1, code)]
    assert found.whole[0].message.endswith("so it is with 2 of 2 rows")
    assert found.faults == ()


@pytest.mark.parametrize("number", [1, 2])
def test_a_shard_of_bad_rows_is_run_where_others_are_good(tmp_path: Path, number: int) -> None:
    found = summary(tmp_path, {"prompt": "a"}, {"question": "b"}, shard=Shard(number, 2))
    assert found.whole == ()
    found.require_usable()
    assert found.num_bad_rows == number - 1


def test_of_a_shard_only_its_own_rows_are_tokenised_and_left(tmp_path: Path) -> None:
    """And none that has the name of an earlier one, once that is known."""
    rows, seen = [{"prompt": "a", "id": name} for name in "abcdb"], list[int]()
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    def look(raw: RawRow) -> ParsedRow | FailedRow:
        seen.append(raw.index)
        return read(raw)

    found = scan(open_source(path), look, Asked(shard=Shard(1, 2)))
    assert seen == [0, 2, 4, 0, 2]
    assert list(found.is_left) == [1, 0, 1, 0, 1]
    assert (found.num_rows, found.num_bad_rows) == (3, 1)


def test_a_column_that_is_taken_in_another_shard_stops_this_one(tmp_path: Path) -> None:
    rows = {"prompt": "a"}, {"prompt": "b", "response": "c"}
    with pytest.raises(InputError, match=r"in\.jsonl:2: the row has a column 'response' already"):
        summary(tmp_path, *rows, shard=Shard(1, 2), rules=RULES).require_usable()


def test_column_that_is_taken_stops_the_run(tmp_path: Path) -> None:
    found = summary(tmp_path, *[{"prompt": "a", "response": "b"}] * 3)
    assert len(found.whole) == 1
    with pytest.raises(InputError, match=r"choose another name as output\.column"):
        found.require_usable()


def test_faults_are_kept_up_to_a_bound(tmp_path: Path) -> None:
    found = summary(tmp_path, *[{"prompt": 5}] * 30, most_faults=10)
    assert (found.num_bad_rows, len(found.faults)) == (30, 10)
    assert found.num_unlisted == 20
    with pytest.raises(InputError, match="and 20 more bad rows"):
        found.require_usable(every_row=True)


def test_workload_of_ready_rows(tmp_path: Path) -> None:
    def ready(raw: RawRow) -> ReadyRow:
        length = 10 * (raw.index + 1)
        sampling = Sampling(max_tokens=4 * length, n=1 + raw.index)
        request = Request(
            index=raw.index, custom_id="x", prompt_tokens=(1,) * length, sampling=sampling
        )
        return ReadyRow(row=Row(index=raw.index, kind="completion"), request=request)

    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\nb\n")
    assert scan(open_source(path), ready).workload == Workload(
        num_sequences=3,
        mean_prompt_tokens=50 / 3,
        mean_new_tokens=200 / 3,
        max_total_tokens=100,
        max_new_tokens=80,
        mean_shared_tokens=16 / 3,
        lengths=(Length(10, 40), Length(20, 80), Length(20, 80, shared_tokens=16)),
    )


def test_memory_grows_by_a_few_bytes_per_row(tmp_path: Path) -> None:
    peaks = []
    for num_rows in (100, 2_000, 22_000):
        path = tmp_path / f"{num_rows}.jsonl"
        with path.open("w") as file:
            file.writelines(f'{{"prompt":"a","id":"row-{place}"}}\n' for place in range(num_rows))
        tracemalloc.start()
        try:
            assert scan(open_source(path), read).num_rows == num_rows
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[2] - peaks[1] < 20_000 * 32
