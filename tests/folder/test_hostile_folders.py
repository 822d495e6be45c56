"""Outputs and run folders in which links, pipes and other things stand for files."""

import os
from pathlib import Path

import pytest

from moebatch.errors import ConfigError, StorageError
from moebatch.folder import claim as claim_module
from moebatch.folder.claim import read_claim
from moebatch.folder.output_path import require_writable
from moebatch.folder.results import begun_from
from moebatch.folder.run_folder import RunFolder
from moebatch.journal.finished import Finished
from moebatch.spec.job import Job


def job_of(folder: Path) -> Job:
    paths = {"model": "model", "input": "in.jsonl", "output": "out.jsonl"}
    return Job.model_validate({key: {"path": folder / name} for key, name in paths.items()})


@pytest.mark.parametrize("name", ["model", "in.jsonl"])
def test_inputs_that_are_links_in_a_circle_are_no_obstacle_to_writing(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).symlink_to(name)
    require_writable(job_of(tmp_path))


def test_an_output_that_is_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to("out.jsonl")
    assert RunFolder(tmp_path / "out.jsonl").path == tmp_path / "out.jsonl.moebatch"
    with pytest.raises(ConfigError, match="is a link that leads back to itself"):
        require_writable(job_of(tmp_path))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Where the only journal of a run folder would be."""
    path = RunFolder(tmp_path / "out.jsonl").journal / "1.jsonl"
    path.parent.mkdir(parents=True)
    return path


def test_a_pipe_in_the_place_of_a_journal_is_not_waited_for(journal: Path) -> None:
    os.mkfifo(journal)
    with pytest.raises(StorageError, match=r"1\.jsonl: is no regular file"):
        Finished(journal.parent)


def test_a_journal_that_is_a_link_in_a_circle_is_a_message(tmp_path: Path, journal: Path) -> None:
    journal.symlink_to(journal.name)
    with pytest.raises(StorageError, match=r"1\.jsonl: reading failed: Too many levels"):
        _ = RunFolder(tmp_path / "out.jsonl").has_records


def test_a_pipe_in_the_place_of_a_manifest_is_not_waited_for(journal: Path) -> None:
    folder = RunFolder(journal.parent.parent.with_suffix(""))
    os.mkfifo(folder.manifest)
    with pytest.raises(ConfigError, match="is no regular file"):
        read_claim(folder)


def test_a_file_in_the_place_of_a_run_folder_is_to_be_moved_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out.jsonl")
    folder.path.touch()
    with pytest.raises(StorageError, match=r"out\.jsonl\.moebatch: is no folder; .*move it away$"):
        read_claim(folder)


def test_nobody_is_told_to_remove_a_folder_that_may_not_be_read(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(claim_module, "read_json", refuse)
    with pytest.raises(StorageError, match=r"manifest\.json: cannot be read: Permission denied$"):
        read_claim(RunFolder(journal.parent.parent.with_suffix("")))


@pytest.mark.parametrize(
    "line", [b"[1,2", b"5", b"null", b'[{"tokens":["1"]}]', b"[[1]]", b"[" * 5000, b"\xff"]
)
def test_what_is_no_beginning_of_an_answer_is_begun_anew(line: bytes) -> None:
    assert begun_from(line, num_choices=1) == ()
