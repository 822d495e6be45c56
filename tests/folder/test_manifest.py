"""An output belongs to one job, and nothing that somebody else wrote is replaced."""

import datetime
import os
from pathlib import Path

import pytest

from moebatch.errors import ConfigError, ExitCode, StorageError
from moebatch.folder.claim import claim, require_own
from moebatch.folder.manifest import Manifest
from moebatch.folder.settled import Settled
from moebatch.rows.raw import RawRow
from moebatch.rows.row import Row

JOB = Manifest(fields={"model": "m", "sampling.temperature": "0"})
TODAY = Settled(date=datetime.date(2026, 11, 21))
OTHER = Manifest(fields={"model": "m", "sampling.temperature": "0.7", "output.column": "answer"})


def _journal(folder: Path) -> Path:
    journal = folder / "out.jsonl.moebatch/journal"
    journal.mkdir()
    return journal / "1.jsonl"


def test_a_claimed_output_stays_open_to_the_same_job(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    claim(JOB, output, TODAY)
    output.write_text("answers")
    claim(JOB, output, TODAY)
    assert [p.name for p in (tmp_path / "out.jsonl.moebatch").iterdir()] == ["manifest.json"]


def test_another_job_is_told_every_field_that_differs(tmp_path: Path) -> None:
    claim(JOB, tmp_path / "out.jsonl", TODAY)
    (tmp_path / "out.jsonl").write_text("answers")
    with pytest.raises(ConfigError) as caught:
        claim(OTHER, tmp_path / "out.jsonl", TODAY)
    assert "output.column was null, is 'answer'" in str(caught.value)
    assert "sampling.temperature was '0', is '0.7'" in str(caught.value)
    require_own(JOB, tmp_path / "out.jsonl")


def test_finished_rows_of_an_interrupted_run_are_kept_from_another_job(tmp_path: Path) -> None:
    claim(JOB, tmp_path / "out.jsonl", TODAY)
    _journal(tmp_path).write_text("a row\n")
    with pytest.raises(ConfigError, match="belongs to another job"):
        claim(OTHER, tmp_path / "out.jsonl", TODAY)


def test_a_run_without_any_row_binds_nobody(tmp_path: Path) -> None:
    claim(JOB, tmp_path / "out.jsonl", TODAY)
    _journal(tmp_path).touch()
    claim(OTHER, tmp_path / "out.jsonl", TODAY)
    require_own(OTHER, tmp_path / "out.jsonl")


def test_a_file_without_a_manifest_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match="not the output of a job"):
        claim(JOB, tmp_path / "out.jsonl", TODAY)
    assert not (tmp_path / "out.jsonl.moebatch").exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\x00", "{}", '{"job": {}}', '{"job": {}, "settled": {"date": 3}}']
)
def test_a_damaged_manifest_is_a_message(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "out.jsonl.moebatch"
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match="remove its folder"):
        require_own(JOB, tmp_path / "out.jsonl")


def test_a_folder_that_cannot_be_made_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.moebatch").write_text("a file in its place")
    with pytest.raises((StorageError, ConfigError)) as caught:
        claim(JOB, tmp_path / "out.jsonl", TODAY)
    assert caught.value.exit_code in (ExitCode.STORAGE, ExitCode.CONFIG)


def test_what_the_first_run_settles_holds_for_all_later_ones(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert claim(JOB, output, TODAY) == TODAY
    tomorrow = Settled(date=datetime.date(2026, 11, 22), num_shards=3)
    assert claim(JOB, output, tomorrow) == Settled(date=TODAY.date, num_shards=3)
    assert require_own(JOB, output) == Settled(date=TODAY.date, num_shards=3)


def test_of_two_first_runs_at_once_one_settles_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between looking and writing."""
    output, real = tmp_path / "out.jsonl", os.link
    theirs = Settled(date=datetime.date(2026, 11, 20))

    def link_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        claim(JOB, output, theirs)
        real(source, target)

    monkeypatch.setattr(os, "link", link_late)
    assert claim(JOB, output, TODAY) == theirs


def test_rows_of_another_job_have_other_keys() -> None:
    raw, row = RawRow(index=0, line=1, content=b"{}"), Row(index=0, line=1)
    assert JOB.row_keys.of(raw, row) != OTHER.row_keys.of(raw, row)
    assert JOB.row_keys.of(raw, row) == Manifest(fields=dict(JOB.fields)).row_keys.of(raw, row)
