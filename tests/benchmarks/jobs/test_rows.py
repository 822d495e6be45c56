"""Prompts as token ids."""

import json
from pathlib import Path

from tests.benchmarks.jobs.lengths import even, ragged
from tests.benchmarks.jobs.rows import token_rows, write_rows


def test_prompts_have_their_exact_lengths() -> None:
    lengths = ragged(50)
    assert [len(row) for row in token_rows(lengths, 1000)] == list(lengths.prompts)


def test_headers_are_shared_and_the_rest_differs() -> None:
    rows = list(token_rows(even(8, 45, 1, header=40), 32_000))
    assert len({tuple(row[:40]) for row in rows}) == 1
    assert len({tuple(row[40:]) for row in rows}) == 8


def test_tokens_are_within_the_vocabulary_and_mean_nothing_special() -> None:
    tokens = {token for row in token_rows(even(20, 500, 1), 100) for token in row}
    assert (min(tokens), max(tokens)) == (5, 99)


def test_rows_say_how_many_tokens_they_get(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", even(2, 3, 7), 100)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["0", "1"]
    assert all(row["max_tokens"] == 7 and row["ignore_eos"] for row in rows)
