"""An output belongs to one job, and nothing that somebody else wrote is replaced."""

from pathlib import Path

import pytest

from moebatch.errors import ConfigError, ExitCode, StorageError
from moebatch.job.manifest import Manifest

JOB = Manifest(fields={"model": "m", "sampling.temperature": "0"})
OTHER = Manifest(fields={"model": "m", "sampling.temperature": "0.7", "output.column": "answer"})


def _journal(folder: Path) -> Path:
    journal = folder / "out.jsonl.moebatch/journal"
    journal.mkdir()
    return journal / "1.jsonl"


def test_a_claimed_output_stays_open_to_the_same_job(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    JOB.claim(output)
    output.write_text("answers")
    JOB.claim(output)
    assert [p.name for p in (tmp_path / "out.jsonl.moebatch").iterdir()] == ["manifest.json"]


def test_another_job_is_told_every_field_that_differs(tmp_path: Path) -> None:
    JOB.claim(tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").write_text("answers")
    with pytest.raises(ConfigError) as caught:
        OTHER.claim(tmp_path / "out.jsonl")
    assert "output.column was null, is 'answer'" in str(caught.value)
    assert "sampling.temperature was '0', is '0.7'" in str(caught.value)
    JOB.require_own(tmp_path / "out.jsonl")


def test_finished_rows_of_an_interrupted_run_are_kept_from_another_job(tmp_path: Path) -> None:
    JOB.claim(tmp_path / "out.jsonl")
    _journal(tmp_path).write_text("a row\n")
    with pytest.raises(ConfigError, match="belongs to another job"):
        OTHER.claim(tmp_path / "out.jsonl")


def test_a_run_without_any_row_binds_nobody(tmp_path: Path) -> None:
    JOB.claim(tmp_path / "out.jsonl")
    _journal(tmp_path).touch()
    OTHER.claim(tmp_path / "out.jsonl")
    OTHER.require_own(tmp_path / "out.jsonl")


def test_a_file_without_a_manifest_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match="not the output of a job"):
        JOB.claim(tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl.moebatch").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_damaged_manifest_is_a_message(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "out.jsonl.moebatch"
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match="remove its folder"):
        JOB.require_own(tmp_path / "out.jsonl")


def test_a_folder_that_cannot_be_made_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.moebatch").write_text("a file in its place")
    with pytest.raises((StorageError, ConfigError)) as caught:
        JOB.claim(tmp_path / "out.jsonl")
    assert caught.value.exit_code in (ExitCode.STORAGE, ExitCode.CONFIG)
