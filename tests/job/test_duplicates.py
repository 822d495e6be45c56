"""Rows with the name of an earlier row fail alone, in whatever runs and shards they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebatch.errors import ExitCode
from moebatch.folder.shard import AskedShard
from moebatch.job.check import check_job
from moebatch.job.merge import merge
from moebatch.job.overview import overview
from moebatch.spec.job import load_job
from tests.job.test_resume import GREEDY, rows, run, write

Checkpoint = Callable[..., Path]
FIRST = {"custom_id": "r0", "prompt": [3, 3], "max_tokens": 1}
CONTENT = [*rows(6), FIRST, {**FIRST, "prompt": [7]}, *rows(7)[6:], {**FIRST, "id": 5}, FIRST]
"""Row 0 is there again as it is in rows 6 and 10, and its name in rows 7 and 9."""


@pytest.fixture
def model(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("mixtral")


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]


def places(folder: Path) -> list[str | None]:
    """By row, the error that it has."""
    found = (answer["response"]["error"] for answer in answers(folder))
    return [error and error["message"] for error in found]


def test_the_first_one_is_answered_and_later_ones_name_its_line(
    tmp_path: Path, model: Path
) -> None:
    assert CONTENT[0] == FIRST
    job = write(tmp_path, model, CONTENT, **GREEDY)
    summary = run(job).status()
    assert (summary.num_done, summary.num_failed) == (11, 4)
    message = "custom_id 'r0' is already that of line 1"
    assert places(tmp_path) == [None] * 6 + [message] * 2 + [None] + [message] * 2
    assert answers(tmp_path)[7]["prompt"] == [7]
    errors = [answers(tmp_path)[index]["response"]["error"] for index in (6, 7, 9, 10)]
    assert [error["line"] for error in errors] == [7, 8, 10, 11]
    assert (overview(load_job(job)).num_done, overview(load_job(job)).num_failed) == (7, 4)
    found = check_job(job)
    assert [fault.line for fault in found.faults] == [7, 8, 10, 11]
    assert found.exit_code is ExitCode.ROWS_FAILED


def test_in_shards_and_runs_as_in_one(tmp_path: Path, model: Path) -> None:
    run(write(tmp_path / "whole", model, CONTENT, **GREEDY))
    job = write(tmp_path / "cut", model, CONTENT, **GREEDY)
    run(job, limit=8)
    (tmp_path / "cut/out.jsonl").unlink()
    for number in (3, 1, 2):
        run(job, shard=AskedShard(number, 3))
    merged = merge(load_job(job))
    assert (merged.num_rows, merged.num_failed) == (11, 4)
    whole, cut = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("whole", "cut"))
    assert cut == whole


def test_a_row_that_gets_the_name_first_takes_the_place_of_the_one_that_had_it(
    tmp_path: Path, model: Path
) -> None:
    """Answers that are there are kept, but not given to rows that are duplicates now."""
    job = write(tmp_path, model, [FIRST], **GREEDY)
    run(job)
    new = {**FIRST, "prompt": [9]}
    write(tmp_path, model, [new, FIRST, FIRST], **GREEDY)
    assert run(job).status().num_ended == 3
    message = "custom_id 'r0' is already that of line 1"
    assert places(tmp_path) == [None, message, message]
    write(tmp_path, model, [{**new, "custom_id": "x"}, FIRST, FIRST], **GREEDY)
    assert run(job).status().num_ended == 2
    assert places(tmp_path) == [None, None, message.replace("line 1", "line 2")]


def test_of_a_job_that_wants_all_rows_good_nothing_is_run(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, [FIRST, FIRST], **GREEDY)
    described = json.loads(job.read_text())
    described["input"]["on_bad_row"] = "fail"
    job.write_text(json.dumps(described))
    assert check_job(job).exit_code is ExitCode.INPUT


def test_rows_of_a_table_that_looks_like_a_batch_are_named_as_the_job_names_them(
    tmp_path: Path, model: Path
) -> None:
    asked = {"url": "u", "method": "m", "body": "b"}
    job = write(tmp_path, model, [{"id": 7, "q": q, **asked} for q in ("one", "two")], **GREEDY)
    described = json.loads(job.read_text())
    described["input"]["prompt"] = "q"
    job.write_text(json.dumps(described))
    assert run(job).status().num_failed == 1
    found = overview(load_job(job))
    assert (found.num_done, found.num_failed) == (1, 1)
