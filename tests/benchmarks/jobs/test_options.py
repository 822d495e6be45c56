"""The command line of the benchmark."""

from pathlib import Path

import pytest

from tests.benchmarks.jobs.options import parse_options

KNOWN = ("ragged", "few-rows")
MORE = ("rows-256",)
PYTHON = ["--llama-python", "/venv/bin/python"]


def test_everything_is_run_unless_only_some_is_asked_for() -> None:
    assert parse_options(KNOWN, MORE, []).only == KNOWN
    assert parse_options(KNOWN, MORE, ["--only", "few-rows"]).only == ("few-rows",)
    assert parse_options(KNOWN, MORE, ["--only", "rows-256"]).only == MORE


def test_small_runs_leave_comparisons_out_unless_they_are_asked_for() -> None:
    assert parse_options(KNOWN, MORE, PYTHON).llama_python == Path("/venv/bin/python")
    small = parse_options(KNOWN, MORE, ["--small", *PYTHON])
    assert (small.llama_python, small.with_variants) == (None, False)
    asked = parse_options(KNOWN, MORE, ["--small", "--peers", "--variants", *PYTHON])
    assert asked.llama_python is not None and asked.with_variants


def test_interpreters_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBATCH_ACCELERATE_PYTHON", "/a/python")
    assert parse_options(KNOWN, MORE, []).accelerate_python == Path("/a/python")
    assert parse_options(KNOWN, MORE, ["--no-peers"]).accelerate_python is None


def test_unknown_jobs_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(KNOWN, MORE, ["--only", "rugged"])
    assert (
        "no job is named 'rugged'; there are ragged, few-rows, rows-256" in capsys.readouterr().err
    )
