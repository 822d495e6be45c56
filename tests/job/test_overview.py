"""What `moebatch status` says: from journals, and without a guess where a process can be seen."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moebatch.errors import MoebatchError, StorageError
from moebatch.folder.final_file import FinalFile
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import ALL, AskedShard
from moebatch.job.merge import merge
from moebatch.job.overview import Overview, overview
from moebatch.job.status_file import read_status
from moebatch.report.console import output_console, show
from moebatch.report.overview import overview_table
from moebatch.spec.job import load_job
from tests.command import carried_out_without
from tests.job.test_identity import edit
from tests.job.test_resume import GREEDY, rows, run, write

DYING = """
import os, signal, sys
from pathlib import Path
from moebatch.folder.shard import ALL
from moebatch.job.status import RunStatus
from moebatch.job.status_file import written_to
path = Path(sys.argv[1])
with written_to(path, ALL, lambda: RunStatus(budget_bytes=1)):
    while not path.exists():
        pass
    print("at work", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def job(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    return write(tmp_path, tiny_checkpoint("mixtral"), rows(20), **GREEDY)


def seen(job: Path) -> Overview:
    return overview(load_job(job))


def said(job: Path, capsys: pytest.CaptureFixture[str]) -> str:
    show(output_console(), overview_table(seen(job), job))
    return capsys.readouterr().out


def rewrite(job: Path, **changes: object) -> None:
    """Changes what the last run of all rows has said of itself."""
    path = RunFolder(job.parent / "out.jsonl").status(ALL)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_run_that_was_killed_is_lost_at_once(tmp_path: Path) -> None:
    path = tmp_path / "status-1-of-1.json"
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "at work\n"
        status = read_status(path)
        assert status is not None and status.is_alive
        process.send_signal(signal.SIGKILL)
        # Until its parent waits for it, its number is still taken.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not status.is_alive
        process.wait()
        assert not status.is_alive


def test_another_process_of_the_same_number_is_not_that_run(job: Path) -> None:
    run(job)
    rewrite(job, state="running")
    assert seen(job).is_alive
    rewrite(job, state="running", started=1)
    assert not seen(job).is_alive
    assert seen(job).shards[0].state == "lost"


def test_elsewhere_a_run_is_believed_for_a_minute(job: Path) -> None:
    run(job)
    rewrite(job, state="running", sight="another host", started=1)
    assert seen(job).is_alive
    rewrite(job, updated=0.0)
    assert not seen(job).is_alive


def test_rows_are_those_of_the_journal_not_of_the_last_word(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job)
    rewrite(job, state="running", done=3, rows=5)
    (one,) = seen(job).shards
    assert (one.num_rows, one.num_done, one.num_failed) == (20, 20, 0)
    assert said(job, capsys).splitlines()[-1].split()[:5] == ["1/1", "running", "20", "0", "20"]


def test_time_left_is_said_before_any_row_has_ended(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job)
    results = RunFolder(job.parent / "out.jsonl").path
    for journal in (path for path in results.iterdir() if "journal" in path.name):
        shutil.rmtree(journal) if journal.is_dir() else journal.unlink()
    rewrite(job, state="running", rows_per_s=0.0, tokens_per_s=12.34, eta_s=4030.0)
    assert said(job, capsys).splitlines()[3].split(None, 1) == ["rate", "12.3 tok/s, 1h07m left"]
    assert seen(job).as_json(job)["tokens_per_s"] == 12.34
    rewrite(job, rows_per_s=0.5)
    assert "rate  30.0 rows a minute, 1h07m left" in said(job, capsys)


def test_shards_that_never_began_are_listed_and_what_to_do_is_said(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert seen(job).next_command(job) == f"moebatch run {job}"
    run(job, shard=AskedShard(3, 5))
    lines = said(job, capsys).splitlines()
    assert [line.split("  ")[0] for line in lines[-3:]] == ["1/5 to 2/5", "3/5", "4/5 to 5/5"]
    assert [one.state for one in seen(job).shards] == [
        *["not begun"] * 2,
        "done",
        *["not begun"] * 2,
    ]
    assert [one.num_left for one in seen(job).shards] == [4, 4, 0, 4, 4]
    assert seen(job).next_command(job) == f"moebatch run {job} --shard 1/5"
    for number in (1, 2, 4, 5):
        run(job, shard=AskedShard(number))
    assert seen(job).next_command(job) == f"moebatch merge {job}"
    assert f"moebatch merge {job}\n" in said(job, capsys)
    merge(load_job(job))
    assert seen(job).next_command(job) is None
    assert "not written yet" not in said(job, capsys)


def test_a_shard_has_ended_though_the_first_row_of_a_name_is_in_another(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    content = rows(4)
    content[2]["custom_id"] = content[1]["custom_id"]
    job = write(tmp_path, tiny_checkpoint("mixtral"), content, **GREEDY)
    run(job, shard=AskedShard(1, 2))
    found = seen(job)
    assert (found.num_done, found.num_failed, found.num_left) == (1, 1, 2)
    assert found.shards[0].num_left == 0
    assert found.next_command(job) == f"moebatch run {job} --shard 2/2"
    run(job, shard=AskedShard(2, 2))
    assert seen(job).next_command(job) == f"moebatch merge {job}"
    assert merge(load_job(job))[:2] == (4, 1)


def test_torch_is_not_loaded(job: Path) -> None:
    assert "0 of 20 done" in carried_out_without("torch", "status", job)


def test_nothing_has_to_be_done_while_a_run_is_at_work(job: Path) -> None:
    run(job, shard=AskedShard(1, 2))
    path = RunFolder(job.parent / "out.jsonl").path / "status-1-of-2.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running"}))
    assert seen(job).next_command(job) is None


def test_of_an_input_without_rows_there_is_nothing_to_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path, tmp_path, [])
    assert seen(job).next_command(job) is None
    assert "  0%" in said(job, capsys)
    assert f"cannot go on: {tmp_path / 'in.jsonl'}: holds no rows" in said(job, capsys)


@pytest.mark.parametrize(
    ("section", "entry", "message"),
    [
        ("sampling", {"max_tokens": 7}, "another job: sampling.max_tokens was '12', is '7'"),
        ("input", {"chat": False}, "another job: input.chat was 'True', is null"),
        ("model", {"chat_template": os.devnull}, "is no regular file"),
        ("input", {"path": "other.jsonl"}, "no row of .*other.jsonl is among them"),
        ("output", {"errors": "mine.txt"}, "mine.txt: output.errors: exists, and this job has not"),
        ("output", {"path": "no/out.jsonl"}, "the folder .*no does not exist"),
        ("output", {"path": "mine.txt"}, "mine.txt: output.path: exists, and no job has written"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_where_a_run_would_be_refused_status_says_so_and_names_no_command(
    job: Path,
    section: str,
    entry: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (job.parent / "mine.txt").write_text("mine")
    (job.parent / "other.jsonl").write_text('{"prompt": "of another"}\n')
    edit(job, "input", chat=True)
    run(job, limit=1)
    assert seen(job).obstacle is None
    edit(job, section, **entry)
    with pytest.raises(MoebatchError, match=message):
        run(job)
    assert seen(job).next_command(job) is None
    assert re.search(f"  next  cannot go on: .*({message})", said(job, capsys))
    assert re.search(message, str(seen(job).as_json(job)["obstacle"]))


def test_nothing_is_in_the_way_of_what_is_done_or_at_work(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # those who only look may not write
        assert "next" not in said(job, capsys)
    edit(job, "sampling", max_tokens=7)
    assert "another job" in said(job, capsys)
    rewrite(job, state="running")
    assert "next" not in said(job, capsys)


def test_word_of_a_shard_that_cannot_be_is_left_out(job: Path) -> None:
    run(job)
    rewrite(job, shard="first/0")
    assert seen(job).shards == ()


def test_an_output_that_lacks_rows_which_have_ended_since_is_to_be_merged(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job, limit=5)
    output = job.parent / "out.jsonl"
    assert seen(job).has_output
    for number in (1, 2):
        run(job, shard=AskedShard(number, 2))
    assert seen(job).next_command(job) == f"moebatch merge {job}"
    assert f"{output} (without the rows that have ended since" in said(job, capsys)
    merge(load_job(job))
    assert seen(job).next_command(job) is None


def test_a_job_that_was_copied_has_its_output(job: Path, tmp_path: Path) -> None:
    run(job)
    os.utime(tmp_path / "out.jsonl", (0, 0))  # copies of journals may be newer
    assert seen(job).has_output
    assert seen(job).next_command(job) is None


def test_an_output_that_could_not_be_replaced_lacks_what_has_ended_since(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job, limit=5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FinalFile, "_replace", interrupted)
        run(job)
    assert seen(job).has_earlier_output
    assert seen(job).next_command(job) == f"moebatch merge {job}"
    merge(load_job(job))
    assert seen(job).next_command(job) is None


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_is_written_is_an_output_also_where_there_is_no_room_to_note_it(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "journal_bytes", property(without_room))
        run(job)
    assert (job.parent / "out.jsonl").read_text().count("\n") == 20
    assert seen(job).next_command(job) == f"moebatch merge {job}"


def without_room(folder: RunFolder) -> int:
    if (folder.path.with_suffix("")).exists():
        raise StorageError("no room left")
    return 0
