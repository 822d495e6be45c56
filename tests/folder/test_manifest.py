"""An output belongs to one job, and nothing that another program wrote is replaced."""

import datetime
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from moebatch.errors import ConfigError, ExitCode, StorageError
from moebatch.folder import claim as claim_module
from moebatch.folder.claim import (
    GENERATION,
    Claim,
    FirstRun,
    Manifest,
    input_path_text,
    read_claim,
    require_own_errors,
    written_claimed,
)
from moebatch.folder.claim import claim as claim_output
from moebatch.folder.claim import require_own as require_own_output
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import ALL, Shard
from moebatch.journal.files import Files
from moebatch.journal.record import Record
from moebatch.journal.writer import JournalWriter
from moebatch.rows.row import RawRow, Row
from tests.journal.faults import FaultyFiles, Noted

PLACE = "/old/in.jsonl"
JOB = Manifest(fields={"model": "m", "sampling.temperature": "0", "input.path": PLACE})
TODAY = FirstRun(date=datetime.date(2026, 11, 21), created=7)
OTHER = Manifest(fields={"model": "m", "sampling.temperature": "0.7", "output.column": "answer"})


@dataclass(frozen=True)
class Rows:
    """An input that lies in some place."""

    path: Path = Path(PLACE)
    contents: tuple[bytes, ...] = (b'{"prompt": "a"}', b'{"prompt": "b"}')

    def __iter__(self) -> Iterator[RawRow]:
        for index, content in enumerate(self.contents):
            yield RawRow(index=index, line=index + 1, content=content)


HERE = Rows()


def claim(manifest: Manifest, output: Path, first: FirstRun, source: Rows = HERE) -> FirstRun:
    return claim_output(manifest, RunFolder(output), source, first).first


def require_own(manifest: Manifest, output: Path, source: Rows = HERE) -> Claim | None:
    return require_own_output(manifest, RunFolder(output), source)


def _journal(folder: Path) -> Path:
    journal = folder / "out.jsonl.moebatch/journal"
    journal.mkdir()
    return journal / "1.jsonl"


def test_a_full_disk_is_said_with_what_is_needed_and_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = partial(FaultyFiles, 3, number=errno.ENOSPC)
    monkeypatch.setattr(claim_module, "Files", full)
    message = r"out\.jsonl\.moebatch: no room left: \d+ B to write, .* free; make room"
    with pytest.raises(StorageError, match=message):
        claim(JOB, tmp_path / "out.jsonl", TODAY)
    assert not [*(tmp_path / "out.jsonl.moebatch").iterdir()]


class Killed(Files):
    """Of a process that does not come to clear up."""

    def remove(self, path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_what_a_run_that_was_killed_was_writing_is_removed_when_nobody_else_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "Files", Killed)
    claim(JOB, tmp_path / "out.jsonl", TODAY)
    folder = RunFolder(tmp_path / "out.jsonl")
    with folder.locked(Shard(1, 2)):
        assert [*folder.path.glob(".*")]
    with folder.locked(ALL):
        assert not [*folder.path.glob(".*")]
        assert folder.manifest.exists()


def test_a_manifest_outlives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    monkeypatch.setattr(claim_module, "Files", lambda: noted)
    ours, names = (
        claim_output(JOB, RunFolder(tmp_path / "out.jsonl"), HERE, TODAY),
        ["create", "sync"],
    )
    folders = ["sync out.jsonl.moebatch", f"sync {tmp_path.name}"]
    assert noted.asked == [*names, *folders]
    noted.asked.clear()
    claim_errors(ours, tmp_path / "out.jsonl", None)
    assert noted.asked == 2 * [*names, "replace", *folders]


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
    differences = "output.column was null, is 'answer'; sampling.temperature was '0', is '0.7'"
    assert differences in str(caught.value)
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
    found = require_own(OTHER, tmp_path / "out.jsonl")
    assert found is not None and found.manifest == OTHER


def test_a_file_without_a_manifest_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(ConfigError, match="no job has written it"):
        claim(JOB, tmp_path / "out.jsonl", TODAY)
    assert not (tmp_path / "out.jsonl.moebatch").exists()


def test_a_file_that_comes_before_a_job_has_written_its_output_is_somebody_elses(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.jsonl"
    first = TODAY.model_copy(update={"is_written": False})
    ours = claim_output(JOB, RunFolder(output), HERE, first)
    _journal(tmp_path).write_text("a row\n")
    output.write_text("precious")
    for use in (partial(claim_errors, ours, output, None), partial(require_own, JOB, output)):
        with pytest.raises(ConfigError, match=r"this job has not written it; move it away.*\.moeb"):
            use()
    output.rename(tmp_path / "elsewhere")
    claim_errors(ours, output, None)
    output.write_text("answers")
    assert require_own(JOB, output) is not None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\x00", "{}", '{"job": {}}', '{"job": {}, "settled": {"date": 3}}']
)
def test_a_damaged_manifest_is_a_message(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "out.jsonl.moebatch"
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match="remove this file, and move the output away"):
        require_own(JOB, tmp_path / "out.jsonl")


def test_a_damaged_manifest_is_replaced_by_the_same_one_as_its_message_says(tmp_path: Path) -> None:
    output, manifest = tmp_path / "out.jsonl", RunFolder(tmp_path / "out.jsonl").manifest
    claim(JOB, output, TODAY)
    _journal(tmp_path).write_text("a row\n")
    keys = claim_output(JOB, RunFolder(output), HERE, TODAY).manifest.row_keys
    manifest.write_text("")
    manifest.unlink()
    again = claim_output(JOB, RunFolder(output), HERE, TODAY).manifest.row_keys
    assert [again.all_of(raw) for raw in HERE] == [keys.all_of(raw) for raw in HERE]


def claim_errors(ours: Claim, output: Path, errors: Path | None) -> None:
    with written_claimed(ours, RunFolder(output), errors):
        pass


def test_failed_rows_never_replace_what_no_run_of_the_job_has_written(tmp_path: Path) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "failed.jsonl"
    errors.write_text("somebody else's")
    with pytest.raises(ConfigError, match=r"output\.errors: .*this job has not written it"):
        require_own_errors(None, RunFolder(output), errors)
    ours = claim_output(JOB, RunFolder(output), HERE, TODAY)
    with pytest.raises(ConfigError, match="this job has not written it"):
        claim_errors(ours, output, errors)
    assert require_own(JOB, output) == ours


def test_what_a_run_that_was_killed_has_written_is_the_jobs(tmp_path: Path) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "failed.jsonl"
    first = TODAY.model_copy(update={"is_written": False})
    ours = claim_output(JOB, RunFolder(output), HERE, first)
    with pytest.raises(KeyboardInterrupt), written_claimed(ours, RunFolder(output), errors):
        output.write_text("answers")
        errors.write_text("failed rows")
        raise KeyboardInterrupt
    claim_errors(claim_output(JOB, RunFolder(output), HERE, TODAY), output, errors)


def test_what_goes_wrong_behind_the_last_line_of_an_output_is_no_fault_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a disk that is full from then on nor a hidden file that somebody has removed."""
    output, errors = tmp_path / "out.jsonl", tmp_path / "failed.jsonl"
    ours = claim_output(JOB, RunFolder(output), HERE, TODAY)
    with written_claimed(ours, RunFolder(output), errors):
        full = partial(FaultyFiles, 3, number=errno.ENOSPC)
        monkeypatch.setattr(claim_module, "Files", full)
        (tmp_path / ".failed.jsonl.moebatch-lock").unlink()
    assert require_own(JOB, output) is not None


def test_failed_rows_replace_those_of_earlier_runs_wherever_their_folder_is(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    output, errors = there / "out.jsonl", there / "failed.jsonl"
    claim_errors(claim_output(JOB, RunFolder(output), HERE, TODAY), output, errors)
    errors.write_text("a failed row")
    moved = there.rename(tmp_path / "moved")
    before = read_claim(RunFolder(moved / "out.jsonl"))
    require_own_errors(before, RunFolder(moved / "out.jsonl"), moved / "failed.jsonl")
    later = claim_output(JOB, RunFolder(moved / "out.jsonl"), HERE, TODAY)
    claim_errors(later, moved / "out.jsonl", moved / "failed.jsonl")


def test_failed_rows_may_go_back_to_where_earlier_ones_went(tmp_path: Path) -> None:
    output, errors = tmp_path / "out.jsonl", [tmp_path / f"failed-{n}.jsonl" for n in range(3)]
    for path in (*errors, *errors[:2]):
        claim_errors(claim_output(JOB, RunFolder(output), HERE, TODAY), output, path)
        path.write_text("a failed row")
    for path in errors:
        require_own_errors(read_claim(RunFolder(output)), RunFolder(output), path)


def test_of_two_jobs_with_one_file_of_failed_rows_the_later_one_is_told(tmp_path: Path) -> None:
    errors = tmp_path / "failed.jsonl"
    first, second = (
        claim_output(JOB, RunFolder(tmp_path / name), HERE, TODAY)
        for name in ("a.jsonl", "b.jsonl")
    )
    claim_errors(first, tmp_path / "a.jsonl", errors)
    errors.write_text("of the first")
    with pytest.raises(ConfigError, match="this job has not written it"):
        claim_errors(second, tmp_path / "b.jsonl", errors)


def test_that_no_row_failed_is_an_answer_of_its_job_as_well(tmp_path: Path) -> None:
    """A second job that fills the empty file would lose its rows when the first one runs again."""
    errors = tmp_path / "failed.jsonl"
    first, second = (
        claim_output(JOB, RunFolder(tmp_path / name), HERE, TODAY)
        for name in ("a.jsonl", "b.jsonl")
    )
    claim_errors(first, tmp_path / "a.jsonl", errors)
    errors.touch()
    with pytest.raises(ConfigError, match="this job has not written it"):
        claim_errors(second, tmp_path / "b.jsonl", errors)


def test_failed_rows_never_go_where_a_job_has_its_answers_there_already_or_not(
    tmp_path: Path,
) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "answers.jsonl"
    ours = claim_output(JOB, RunFolder(output), HERE, TODAY)
    claim_errors(ours, output, errors)
    before = read_claim(RunFolder(output))
    claim(OTHER, errors, TODAY)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"output\.errors: is the output of a job"):
            require_own_errors(before, RunFolder(output), errors)
        with pytest.raises(ConfigError, match="is the output of a job"):
            claim_errors(before or ours, output, errors)
        errors.write_text("an answer of the other job")


def test_a_manifest_names_an_input_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    strange = Path(os.fsdecode(b"/data/Pr\xfcf/in.jsonl"))
    job = Manifest(fields={"model": "m", "input.path": input_path_text(strange)})
    claim(job, tmp_path / "out.jsonl", TODAY, Rows(strange))
    (tmp_path / "out.jsonl").write_text("answers")
    assert require_own(job, tmp_path / "out.jsonl", Rows(strange)) is not None


def test_what_earlier_versions_did_not_keep_makes_no_other_job(tmp_path: Path) -> None:
    claim(JOB, tmp_path / "out.jsonl", TODAY)
    (tmp_path / "out.jsonl").write_text("answers")
    newer = Manifest(fields={**JOB.fields, GENERATION: "{}"})
    assert require_own(newer, tmp_path / "out.jsonl") is not None


def test_a_folder_that_cannot_be_made_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.moebatch").write_text("a file in its place")
    with pytest.raises((StorageError, ConfigError)) as caught:
        claim(JOB, tmp_path / "out.jsonl", TODAY)
    assert caught.value.exit_code in (ExitCode.STORAGE, ExitCode.CONFIG)


def test_what_the_first_run_settles_holds_for_all_later_ones(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert claim(JOB, output, TODAY) == TODAY
    tomorrow = FirstRun(date=datetime.date(2026, 11, 22), created=8, num_shards=3)
    assert claim(JOB, output, tomorrow) == FirstRun(date=TODAY.date, created=7, num_shards=3)
    before = require_own(JOB, output)
    assert before is not None
    assert before.first == FirstRun(date=TODAY.date, created=7, num_shards=3)


def test_of_two_first_runs_at_once_one_settles_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between looking and writing."""
    output, real = tmp_path / "out.jsonl", os.link
    theirs = FirstRun(date=datetime.date(2026, 11, 20))

    def link_late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        claim(JOB, output, theirs)
        real(source, target)

    monkeypatch.setattr(os, "link", link_late)
    assert claim(JOB, output, TODAY) == theirs


def test_a_first_run_that_comes_while_another_looks_settles_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, look = tmp_path / "out.jsonl", claim_module.require_own
    theirs = FirstRun(date=datetime.date(2026, 11, 20))

    def look_and_wait(manifest: Manifest, folder: RunFolder, source: Rows) -> Claim | None:
        before = look(manifest, folder, source)
        monkeypatch.setattr(claim_module, "require_own", look)
        claim(JOB, output, theirs)
        return before

    monkeypatch.setattr(claim_module, "require_own", look_and_wait)
    assert claim(JOB, output, TODAY) == theirs
    left = require_own(JOB, output)
    assert left is not None and left.first == theirs


def test_where_a_file_system_has_no_links_a_job_claims_its_output_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert claim(JOB, tmp_path / "out.jsonl", TODAY) == TODAY
    left = require_own(JOB, tmp_path / "out.jsonl")
    assert left is not None and left.first == TODAY


def test_rows_of_another_job_have_other_keys() -> None:
    raw, row = RawRow(index=0, line=1, content=b"{}"), Row(index=0, line=1)
    assert JOB.row_keys.of(raw, row) != OTHER.row_keys.of(raw, row)
    same = Manifest(fields=dict(reversed(JOB.fields.items())))
    assert JOB.row_keys.of(raw, row) == same.row_keys.of(raw, row)


def test_rows_that_have_moved_are_known_and_those_of_another_input_are_not(tmp_path: Path) -> None:
    output, moved = tmp_path / "out.jsonl", Path("/new/in.jsonl.gz")
    claim(JOB, output, TODAY)
    with JournalWriter(RunFolder(output).journal) as journal:
        raw = list(HERE)[1]
        journal.add(Record(JOB.row_keys.all_of(raw).placed, 0, "done", b"{}"))
    there = Manifest(fields={**JOB.fields, "input.path": str(moved)})
    found = require_own(there, output, Rows(moved))
    assert found is not None
    assert found.manifest.row_keys.all_of(raw) == JOB.row_keys.all_of(raw)
    with pytest.raises(ConfigError, match=r"those of /old/in\.jsonl, and no row of /new"):
        require_own(there, output, Rows(moved, (b'{"prompt": "c"}',)))
    edited_in_place = Rows(contents=(b'{"prompt": "c"}',))
    assert require_own(JOB, output, edited_in_place) is not None


def test_an_output_without_its_journal_is_not_replaced_by_an_input_from_elsewhere(
    tmp_path: Path,
) -> None:
    claim(JOB, tmp_path / "out.jsonl", TODAY)
    (tmp_path / "out.jsonl").write_text("answers")
    with pytest.raises(ConfigError, match="no row of /new is among them"):
        require_own(JOB, tmp_path / "out.jsonl", Rows(Path("/new")))


def test_half_a_record_is_no_reason_to_refuse_an_input_that_has_moved(tmp_path: Path) -> None:
    claim(JOB, tmp_path / "out.jsonl", TODAY)
    _journal(tmp_path).write_text('{"key":"cut')
    assert require_own(JOB, tmp_path / "out.jsonl", Rows(Path("/new"))) is not None


def test_a_manifest_of_the_former_version_is_still_one(tmp_path: Path) -> None:
    """It kept no time, so answers stay without one, as those that are there."""
    folder = RunFolder(tmp_path / "out.jsonl")
    folder.path.mkdir()
    settled = {"date": "2026-11-20", "num_shards": None}
    folder.manifest.write_text(json.dumps({"job": dict(JOB.fields), "settled": settled}))
    _journal(tmp_path).write_text("a row\n")
    assert claim(JOB, tmp_path / "out.jsonl", TODAY).created == 0
    (tmp_path / "out.jsonl").write_text("it may have written this")
    claim(JOB, tmp_path / "out.jsonl", TODAY)


@pytest.mark.parametrize(
    ("line", "content", "keys"),
    [
        (
            3,
            b'{"prompt": "a"}',
            ["3e31b0ea3dd233a4f2adf9d672a28f82", "07718f9d1031b9e687ed58245089246b"],
        ),
        (
            None,
            {"prompt": "a", "n": 1},
            ["1ba12d2f4cd40500b7a036febedbe050", "b160865eda6730b5777c5c8155179d2b"],
        ),
    ],
)
def test_rows_are_known_by_the_keys_that_earlier_versions_have_written(
    line: int | None, content: bytes | dict[str, object], keys: list[str]
) -> None:
    """Or jobs that are half done would be computed anew."""
    found = Manifest(fields={"b": "2", "a": "1"}).row_keys.all_of(
        RawRow(index=1, line=line, content=content)
    )
    assert [found.own.hex(), found.placed.hex()] == keys
