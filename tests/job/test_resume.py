"""A job that was stopped goes on where it was: the same bytes in the end, and nothing twice."""

import datetime
import errno
import fcntl
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moebatch.engine.passes import layout
from moebatch.engine.progress.course import Course
from moebatch.engine.progress.time_left import PassDone, TimeLeft
from moebatch.errors import (
    ConfigError,
    InputError,
    LockHeld,
    MoebatchError,
    Stopped,
    StorageError,
)
from moebatch.folder.claim import Claim, FirstRun, Manifest, written_claimed
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import ALL, AskedShard, Shard
from moebatch.job.answering import Answering
from moebatch.job.attempt import Attempt
from moebatch.job.merge import merge
from moebatch.job.options import RunOptions
from moebatch.job.overview import overview
from moebatch.job.run import JobRun
from moebatch.job.status_file import read_status
from moebatch.job.stop import Stop
from moebatch.journal.finished import Finished
from moebatch.model.decoder import Decoder
from moebatch.spec.job import load_job
from moebatch.spec.model import cache_layout
from moebatch.spec.request import Request
from moebatch.store.kv.cache import KVCache
from tests.patience import until
from tests.tiny import CACHED_APART

Checkpoint = Callable[..., Path]
GREEDY = {"temperature": 0, "max_tokens": 12}
SAMPLED = {"temperature": 0.9, "max_tokens": 12, "n": 2, "stop": ["e "]}


def rows(count: int, headers: Sequence[list[int]] = ([],)) -> list[dict[str, object]]:
    """Whose prompts begin with the headers in turn."""
    return [
        {
            "custom_id": f"r{i}",
            "prompt": headers[i % len(headers)] + [3 + (7 * i) % 200] * (2 + i % 9),
            "max_tokens": 1 + i % 12,
        }
        for i in range(count)
    ]


def write(folder: Path, model: Path, content: list[dict[str, object]], **sampling: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    job = {
        "model": {"path": str(model), "dtype": "float32"},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": sampling,
        "resources": {"dram": "8GiB", "threads": 1},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


def run(path: Path, stop: Stop | None = None, **options: object) -> JobRun:
    job_run = JobRun(load_job(path), lambda line: None, RunOptions(**options), stop)  # type: ignore[arg-type]
    job_run.execute()
    return job_run


def stopped_after(
    path: Path, num_tokens: int, said: list[str] | None = None, **options: Any
) -> JobRun | None:
    """The run if it was stopped when it had generated so many tokens, at some point of a pass; None
    if it had ended by then. What it ended with is `said`."""
    stop = Stop()
    job_run = JobRun(load_job(path), lambda line: None, RunOptions(**options), stop)
    attend, num_left = Decoder.attend, [1 + num_tokens % 7]

    def attend_and_ask(self: Decoder, *arguments: Any) -> object:
        if job_run.status().engine.generated_tokens >= num_tokens:
            num_left[0] -= 1
            if num_left[0] == 0:
                stop._reason = "the test"
                stop._asked.set()
                assert job_run._attempt is not None and job_run._attempt.built is not None
                engine = job_run._attempt.built.engine
                until(lambda: engine._interruption is not None)
        return attend(self, *arguments)

    with pytest.MonkeyPatch.context() as watching:
        watching.setattr(Decoder, "attend", attend_and_ask)
        try:
            job_run.execute()
            return None
        except Stopped as stopped:
            if said is not None:
                said.append(str(stopped))
            return job_run


def answers(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out.jsonl").read_bytes().splitlines()
    return [json.loads(line)["response"] for line in lines]


def whole_and_cut(
    folder: Path, model: Path, content: list[dict[str, object]], num_tokens: int, **sampling: object
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers of a job that is not stopped, and of one that is whenever it has generated so many
    tokens, twice at the least."""
    run(write(folder / "whole", model, content, **sampling))
    job, num_stops = write(folder / "cut", model, content, **sampling), 0
    while stopped_after(job, num_tokens) is not None:
        num_stops += 1
    assert num_stops > 1
    return answers(folder / "whole"), answers(folder / "cut")


@pytest.fixture
def model(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("mixtral")


@pytest.mark.few(2)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", CACHED_APART)
def test_stopped_again_and_again_it_ends_with_the_same_bytes_and_no_token_twice(
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sampling: dict[str, object],
) -> None:
    """Whatever is cached of what has been computed: slices are short, so that windows go round."""
    monkeypatch.setattr(cache_layout, "LARGEST_SLICE", 8)
    monkeypatch.setattr(layout, "PROMPT_ROWS", 8)
    model, content = tiny_checkpoint(family), rows(24, ([9] * 20, []))
    whole = run(write(tmp_path / "whole", model, content, **sampling))
    job = write(tmp_path / "cut", model, content, **sampling)
    noise = random.Random(1)
    num_tokens, num_stops = 0, 0
    while (cut := stopped_after(job, noise.randrange(150))) is not None:
        num_tokens += cut.status().engine.generated_tokens
        num_stops += 1
        assert not (tmp_path / "cut/out.jsonl").exists()
        assert num_stops < 500
    assert (tmp_path / "cut/out.jsonl").read_bytes() == (tmp_path / "whole/out.jsonl").read_bytes()
    assert num_stops > 0
    assert num_tokens <= whole.status().engine.generated_tokens


@pytest.mark.exhaustive
def test_log_probabilities_of_what_was_begun_are_kept(tmp_path: Path, model: Path) -> None:
    """Later ones may differ in their last digits, as they do between batches."""
    sampling = {**SAMPLED, "logprobs": 2, "max_tokens": 12}
    both = whole_and_cut(tmp_path, model, rows(30), 40, **sampling)
    for whole, cut in zip(*both, strict=True):
        assert cut["text"] == whole["text"]
        for ours, theirs in zip(cut["logprobs"], whole["logprobs"], strict=True):
            values = [[each["logprob"] for each in side["content"]] for side in (ours, theirs)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_what_was_begun_when_a_disk_failed_is_gone_on_with(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(write(tmp_path / "whole", model, rows(24), **GREEDY)).status()
    job = write(tmp_path / "cut", model, rows(24), **GREEDY)
    job_run, attend = JobRun(load_job(job), lambda line: None), Decoder.attend

    def attend_or_fail(self: Decoder, *arguments: Any) -> object:
        if job_run.status().engine.generated_tokens >= 60:
            raise StorageError("weights: reading failed: Stale file handle")
        return attend(self, *arguments)

    with monkeypatch.context() as failing:
        failing.setattr(Decoder, "attend", attend_or_fail)
        with pytest.raises(StorageError, match="Stale"):
            job_run.execute()
    assert overview(load_job(job)).num_begun > 0
    rest = run(job).status().engine.generated_tokens
    assert job_run.status().engine.generated_tokens + rest <= whole.engine.generated_tokens
    assert (tmp_path / "cut/out.jsonl").read_bytes() == (tmp_path / "whole/out.jsonl").read_bytes()


def test_a_stop_says_what_there_is(tmp_path: Path, model: Path) -> None:
    """Of a second run, too: with what the first one has left."""
    job, said = write(tmp_path, model, rows(24), **GREEDY), list[str]()
    for num_tokens in (60, 20):
        cut = stopped_after(job, num_tokens, said)
        assert cut is not None
        seen = overview(load_job(job))
        with Finished(RunFolder(tmp_path / "out.jsonl").journal) as finished:
            lines = [finished.line(place) for place in range(len(finished))]
        begun = [json.loads(line) for line in lines if line.startswith(b"[")]
        num_begun = sum(len(choice["tokens"]) for choices in begun for choice in choices)
        assert num_begun > 0 and seen.num_done == cut.status().num_done < 24
        assert said[-1] == (
            f"stopped early (the test): {seen.num_done} of 24 rows are done, and {num_begun} "
            "tokens of others; run the job again to go on"
        )


def test_a_run_without_lanes_stops_in_the_middle_of_a_pass_as_well(
    tmp_path: Path, model: Path
) -> None:
    for name in ("whole", "cut"):
        write(tmp_path / name, model, rows(12), **GREEDY)
    assert stopped_after(tmp_path / "cut/job.yaml", 20, is_plain=True) is not None
    for name in ("whole", "cut"):
        run(tmp_path / name / "job.yaml", is_plain=True)
    assert (tmp_path / "cut/out.jsonl").read_bytes() == (tmp_path / "whole/out.jsonl").read_bytes()


def test_a_stop_after_one_token_does_not_say_tokens(tmp_path: Path, model: Path) -> None:
    job, said = write(tmp_path, model, rows(12)[-1:], **GREEDY), list[str]()
    assert stopped_after(job, 1, said) is not None
    assert "0 of 1 rows are done, and 1 token of others;" in said[0]


def test_rows_whose_records_were_damaged_are_answered_again(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, rows(9), **GREEDY)
    run(job)
    output, said = tmp_path / "out.jsonl", list[str]()
    whole, (journal,) = output.read_bytes(), RunFolder(output).journal.iterdir()
    lines = journal.read_bytes().splitlines(keepends=True)
    for number in (2, 5):
        lines[number] = lines[number].replace(b"prompt", b"qrompt")
    journal.write_bytes(b"".join(lines))
    job_run = JobRun(load_job(job), said.append)
    job_run.execute()
    assert job_run.status().num_ended == 2
    assert output.read_bytes() == whole
    warnings = [line for line in said if "damaged" in line]
    assert warnings == [
        f"warning: {journal.parent}: 2 records were damaged; those rows are answered again"
    ]


def test_a_run_that_adds_nothing_to_what_others_have_left_is_fruitless(
    tmp_path: Path, model: Path
) -> None:
    """Else a job that never gets further would be queued again for ever."""
    content: list[dict[str, object]] = [{"custom_id": "bad", "prompt": []}, *rows(9)]
    job, found = write(tmp_path, model, content, **GREEDY), []
    for num_tokens in (12, 0, 0):
        assert stopped_after(job, num_tokens) is not None
        status = read_status(RunFolder(tmp_path / "out.jsonl").status(ALL))
        found.append(status and status.fruitless)
    assert found == [0, 1, 2]


def test_rows_that_were_answered_are_progress(tmp_path: Path, model: Path) -> None:
    stop = Stop()
    run(write(tmp_path, model, rows(3), **GREEDY), stop)
    assert stop.has_gained


def test_tokens_of_an_answer_that_has_not_ended_are_progress(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, rows(12)[-1:], **GREEDY)
    cut = stopped_after(job, 5)
    assert cut is not None and cut.status().num_done == 0
    status = read_status(RunFolder(tmp_path / "out.jsonl").status(ALL))
    assert status is not None and status.fruitless == 0


def test_rows_that_are_appended_meanwhile_cost_none_that_were_there(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write(tmp_path, model, rows(9), **GREEDY)
    requests = Answering.requests

    def append_and_request(self: Answering) -> Iterator[Request]:
        for request in requests(self):
            yield request
            with (tmp_path / "in.jsonl").open("a") as file:
                file.write('{"custom_id": "late", "prompt": [5], "max_tokens": 2}\n')

    with monkeypatch.context() as appending:
        appending.setattr(Answering, "requests", append_and_request)
        message = "was changed while the job ran; rows that have ended are kept, run the job again"
        with pytest.raises(InputError, match=message):
            run(job)
    found = overview(load_job(job))
    assert (found.num_done, found.num_left) == (9, 9)
    assert run(job).status().num_ended == 9
    assert len(answers(tmp_path)) == 18


def test_a_finished_job_has_nothing_to_do(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, rows(9), **GREEDY)
    run(job)
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run(job)
    assert again.status().engine.generated_tokens == 0
    assert again.status().num_done == 9
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_an_output_that_was_removed_is_written_again_from_the_journal(
    tmp_path: Path, model: Path
) -> None:
    job = write(tmp_path, model, rows(9), **GREEDY)
    run(job)
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    assert run(job).status().engine.generated_tokens == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_without_locks_a_run_that_was_taken_for_gone_writes_no_output(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was suspended for longer than its heart may be silent."""

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def take_over(line: str) -> None:
        if line.startswith("defaults of rows"):
            held.unlink()
            held.touch()

    monkeypatch.setattr(fcntl, "flock", refuse)
    job, held = write(tmp_path, model, rows(4), **GREEDY), tmp_path / "out.jsonl.moebatch/lock.held"
    suspended = JobRun(load_job(job), take_over)
    with pytest.raises(LockHeld, match="another run has taken it over"):
        suspended.execute()
    assert held.exists() and not (tmp_path / "out.jsonl").exists()
    held.unlink()
    assert run(job).status().num_ended == 0, "what it has computed is kept"
    assert len(answers(tmp_path)) == 4


def test_a_file_that_a_user_puts_in_the_way_of_the_output_is_never_replaced(
    tmp_path: Path, model: Path
) -> None:
    """Neither by a run that goes on nor by a merge, one of rows that have not ended included."""
    job, output = write(tmp_path, model, rows(4), **GREEDY), tmp_path / "out.jsonl"
    run(job, shard=AskedShard(1, 2))
    with pytest.raises(MoebatchError, match="2 rows have not ended"):
        merge(load_job(job))
    output.write_text("precious")
    for end in (run, lambda path: merge(load_job(path))):
        with pytest.raises(ConfigError, match="this job has not written it; move it away"):
            end(job)
    assert output.read_text() == "precious"
    output.unlink()
    run(job, shard=AskedShard(2, 2))
    output.write_text("precious")
    seen = overview(load_job(job))
    assert not seen.has_output and not seen.has_earlier_output
    output.unlink()
    assert run(job).status().num_ended == 0
    assert len(answers(tmp_path)) == 4


def test_rows_that_were_appended_edited_or_put_in_are_computed_and_no_others(
    tmp_path: Path, model: Path
) -> None:
    content = rows(12)
    job = write(tmp_path, model, content, **GREEDY)
    run(job)
    content[3] = {**content[3], "prompt": [9, 9, 9], "max_tokens": 5}
    new: list[dict[str, object]] = [
        {"custom_id": "in front", "prompt": [5], "max_tokens": 2},
        *content,
        {"custom_id": "behind", "prompt": [6], "max_tokens": 3},
    ]
    write(tmp_path, model, new, **GREEDY)
    again = run(job)
    assert again.status().num_ended == 3
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in new]
    assert lines[4]["prompt"] == [9, 9, 9]


def test_rows_without_names_are_named_by_their_lines(tmp_path: Path, model: Path) -> None:
    content: list[dict[str, object]] = [{"prompt": [4]}, {"prompt": [4]}, {"prompt": [5]}]
    job = write(tmp_path, model, content, **GREEDY)
    run(job)
    write(tmp_path, model, [{"prompt": [8]}, *content], **GREEDY)
    run(job)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [line["response"]["custom_id"] for line in lines] == ["1", "2", "3", "4"]


def test_rows_without_names_are_others_where_blank_lines_have_come_or_gone(
    tmp_path: Path, model: Path
) -> None:
    """Their names, which are their lines, would otherwise be there twice."""
    lines = [json.dumps({"prompt": [4 + number], "max_tokens": 2}) for number in range(3)]
    job = write(tmp_path, model, [], **GREEDY)
    (tmp_path / "in.jsonl").write_text("\n".join(["", *lines[:2]]))
    run(job)
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert run(job).status().num_ended == 3
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [answer["response"]["custom_id"] for answer in answers] == ["1", "2", "3"]


def test_failed_rows_are_tried_again(tmp_path: Path, model: Path) -> None:
    content: list[dict[str, object]] = [*rows(3), {"custom_id": "bad", "prompt": []}]
    job = write(tmp_path, model, content, **GREEDY)
    for _ in range(2):
        assert run(job).status().num_failed == 1
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 4


def test_what_was_begun_of_rows_that_had_failed_is_gone_on_with(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of those for which an earlier run had too little memory."""
    whole = run(write(tmp_path / "whole", model, rows(12), **GREEDY)).status().engine
    job = write(tmp_path / "cut", model, rows(12), **GREEDY)
    with monkeypatch.context() as without_room:
        without_room.setattr(KVCache, "holds", lambda self, num_tokens: False)
        assert run(job).status().num_failed == 12
    cut = stopped_after(job, 30)
    assert cut is not None and overview(load_job(job)).num_begun > 0
    rest = run(job).status().engine
    begun = cut.status().engine.generated_tokens
    assert begun > 0 and begun + rest.generated_tokens <= whole.generated_tokens
    assert (tmp_path / "cut/out.jsonl").read_bytes() == (tmp_path / "whole/out.jsonl").read_bytes()


@pytest.fixture
def shards(tmp_path: Path, model: Path) -> Iterator[tuple[Path, bytes]]:
    """A job to be run in shards, and what it should end with."""
    content = rows(20)
    run(write(tmp_path / "whole", model, content, **GREEDY))
    yield write(tmp_path, model, content, **GREEDY), (tmp_path / "whole/out.jsonl").read_bytes()


def test_shards_are_merged_into_the_same_bytes(shards: tuple[Path, bytes]) -> None:
    job, expected = shards
    for number in (2, 3, 1):
        with pytest.raises(MoebatchError, match="rows have not ended yet, the first in line"):
            if number == 2:
                run(job, shard=AskedShard(2, 3))
            merge(load_job(job))
        if number != 2:
            run(job, shard=AskedShard(number, 3))
    assert (merge(load_job(job)).num_rows, overview(load_job(job)).num_left) == (20, 0)
    assert (job.parent / "out.jsonl").read_bytes() == expected


def test_what_is_merged_without_a_manifest_is_this_jobs_from_then_on(
    shards: tuple[Path, bytes],
) -> None:
    job, expected = shards
    run(job)
    RunFolder(job.parent / "out.jsonl").manifest.unlink()
    (job.parent / "out.jsonl").unlink()
    merge(load_job(job))
    assert run(job).status().num_ended == 0
    assert (job.parent / "out.jsonl").read_bytes() == expected


def test_of_two_jobs_that_end_at_once_one_writes_the_failed_rows(
    tmp_path: Path, model: Path
) -> None:
    job = write(tmp_path, model, [*rows(2), {"custom_id": "bad", "prompt": []}], **GREEDY)
    content = json.loads(job.read_text())
    content["output"]["errors"] = "failed.jsonl"
    job.write_text(json.dumps(content))
    other = Claim(manifest=Manifest(fields={"model": "another"}), first=FirstRun.today(ALL))
    (tmp_path / "other").mkdir()
    with written_claimed(other, RunFolder(tmp_path / "other/out.jsonl"), tmp_path / "failed.jsonl"):
        for end in (run, lambda path: merge(load_job(path))):
            with pytest.raises(LockHeld, match=r"failed.jsonl: another run is using it"):
                end(job)
    assert not (tmp_path / "out.jsonl").exists()
    assert run(job).status().engine.generated_tokens == 0
    assert len((tmp_path / "failed.jsonl").read_bytes().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        *("failed.jsonl", "in.jsonl", "job.yaml", "out.jsonl")
    ]


def test_nothing_to_merge_is_a_message(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, rows(2), **GREEDY)
    with pytest.raises(ConfigError, match="there is nothing to merge"):
        merge(load_job(job))


def test_a_shard_keeps_others_out_but_not_other_shards(shards: tuple[Path, bytes]) -> None:
    job, _ = shards
    folder = RunFolder(job.parent / "out.jsonl")
    with folder.locked(Shard(1, 2)):
        with pytest.raises(LockHeld, match="shard 1/2: another run"):
            run(job, shard=AskedShard(1, 2))
        with pytest.raises(LockHeld, match="runs of its shards are using it"):
            run(job)
        run(job, shard=AskedShard(2, 2))


@pytest.mark.parametrize(("moment", "num_in_vain"), [("_plan_and_build", 0), ("_answer_all", 2)])
def test_a_shard_whose_job_was_edited_while_it_began_never_seems_to_have_succeeded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, moment: str, num_in_vain: int
) -> None:
    """Another shard takes the folder for the edited job, since no row has ended yet."""
    job = write(tmp_path, model, rows(4), **GREEDY)
    go_on = getattr(Attempt, moment)

    def edit_and_go_on(self: Attempt, *arguments: Any) -> None:
        monkeypatch.setattr(Attempt, moment, go_on)
        job.write_text(json.dumps({**json.loads(job.read_text()), "sampling": SAMPLED}))
        run(job, shard=AskedShard(2, 2))
        go_on(self, *arguments)

    monkeypatch.setattr(Attempt, moment, edit_and_go_on)
    message = "has become another job's while this one ran: .*temperature was '0.0', is '0.9'"
    with pytest.raises(ConfigError, match=message):
        run(job, shard=AskedShard(1, 2))
    with Finished(RunFolder(tmp_path / "out.jsonl").journal) as finished:
        assert len(finished) == 2 + num_in_vain
    run(job, shard=AskedShard(1, 2))
    assert merge(load_job(job)).num_rows == 4


def test_how_many_shards_there_are_is_said_once(
    shards: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Task 3 of an array that was asked for tasks 2 and 3 only knows that it is the third."""
    job, expected = shards
    with pytest.raises(ConfigError, match="no run of this job has said yet"):
        run(job, shard=AskedShard(1))
    run(job, shard=AskedShard(1, 3))
    with pytest.raises(ConfigError, match="divided into 3 shards, not 2"):
        run(job, shard=AskedShard(2, 2))
    second = run(job, shard=AskedShard(2)).status()
    assert (second.num_ended, second.num_rows) == (7, 7)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    assert run(job).status().num_ended == 6
    assert merge(load_job(job)).num_rows == 20
    assert (job.parent / "out.jsonl").read_bytes() == expected


def test_all_rows_may_be_done_at_once_after_all(shards: tuple[Path, bytes]) -> None:
    job, expected = shards
    run(job, shard=AskedShard(2, 3))
    assert run(job).status().num_ended == 13
    assert (job.parent / "out.jsonl").read_bytes() == expected


def test_prompts_have_the_date_of_the_first_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moebatch.folder import claim

    template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"
    (tmp_path / "dated.jinja").write_text(template)
    content = [
        {"custom_id": f"r{i}", "messages": [{"role": "user", "content": "hi"}]} for i in "ab"
    ]

    def job(folder: str, content: list[dict[str, object]]) -> Path:
        path = write(tmp_path / folder, model, content, **GREEDY)
        described = json.loads(path.read_text())
        described["model"]["chat_template"] = str(tmp_path / "dated.jinja")
        path.write_text(json.dumps(described))
        return path

    run(job("whole", content))  # type: ignore[arg-type]
    run(job("cut", content[:1]))  # type: ignore[arg-type]

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> "Tomorrow":
            return cls(2031, 1, 1)

    monkeypatch.setattr(claim.datetime, "date", Tomorrow)
    run(job("cut", content))  # type: ignore[arg-type]
    assert (tmp_path / "cut/out.jsonl").read_bytes() == (tmp_path / "whole/out.jsonl").read_bytes()


def test_bad_rows_of_no_dialect_look_alike_in_every_run(tmp_path: Path, model: Path) -> None:
    content = [rows(1)[0], *({"nonsense": i} for i in range(3))]
    batch = {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": [5], "max_tokens": 2},
    }
    run(write(tmp_path / "whole", model, [*content, batch, {**batch, "custom_id": "c"}], **GREEDY))
    run(write(tmp_path / "cut", model, content[:2], **GREEDY))
    run(write(tmp_path / "cut", model, [*content, batch, {**batch, "custom_id": "c"}], **GREEDY))
    outputs = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("whole", "cut"))
    whole, cut = (re.sub(rb'"created":\d+', b"", output) for output in outputs)
    assert cut == whole


def test_a_row_that_is_no_json_is_answered_as_the_others_are(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, rows(2), **GREEDY)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{\n")
    run(job)
    *_, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert bad["response"]["error"]["code"] == "invalid_json_line" and "id" not in bad


def test_answers_name_the_model_as_the_job_does(tmp_path: Path, model: Path) -> None:
    batch = {"method": "POST", "url": "/v1/completions", "body": {"prompt": [5], "max_tokens": 2}}
    job = write(tmp_path, model, [{"custom_id": "b", **batch}], **GREEDY)
    content = json.loads(job.read_text())
    content["model"]["name"] = "the-good-one"
    job.write_text(json.dumps(content))
    run(job)
    assert [answer["body"]["model"] for answer in answers(tmp_path)] == ["the-good-one"]


def test_answers_have_the_time_of_the_first_run(tmp_path: Path, model: Path) -> None:
    body = {"prompt": [5], "max_tokens": 2}
    batch = {"method": "POST", "url": "/v1/completions", "body": body}
    content: list[dict[str, object]] = [{"custom_id": name, **batch} for name in "abc"]
    before = int(time.time())
    run(write(tmp_path, model, content[:2], **GREEDY))
    manifest = tmp_path / "out.jsonl.moebatch/manifest.json"
    said = json.loads(manifest.read_text())
    said["settled"]["created"] -= 3600
    manifest.write_text(json.dumps(said))
    run(write(tmp_path, model, content, **GREEDY))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    first, second, third = (json.loads(line)["response"]["body"]["created"] for line in lines)
    assert before <= first == second <= time.time()
    assert third == first - 3600


def test_what_was_begun_counts_as_prompt_when_the_rest_is_planned(
    tmp_path: Path, model: Path
) -> None:
    content: list[dict[str, object]] = [{"custom_id": "x", "prompt": [5] * 4, "max_tokens": 300}]
    job = write(tmp_path, model, content, temperature=0, ignore_eos=True)
    assert stopped_after(job, 1) is not None, "it ended before it could be stopped"
    said: list[str] = []
    JobRun(load_job(job), said.append, RunOptions()).execute()
    lengths = [int(word) for word in said[0].replace(",", "").split() if word.isdigit()]
    _, known, new, _ = lengths
    assert known + new == 304
    assert known > 4


def test_a_shard_without_rows_has_nothing_to_do(tmp_path: Path, model: Path) -> None:
    job = write(tmp_path, model, rows(2), **GREEDY)
    assert run(job, shard=AskedShard(3, 3)).status().num_rows == 0
    assert [run(job, shard=AskedShard(n)).status().num_done for n in (1, 2)] == [1, 1]
    assert merge(load_job(job)).num_rows == 2


def test_after_every_pass_a_run_knows_how_long_it_has_left(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_run = JobRun(load_job(write(tmp_path, model, rows(30), **GREEDY)), lambda line: None)
    told: list[float | None] = []
    numbers: list[int] = []
    after_pass, add = Course.after_pass, TimeLeft.add

    def asked(self: Course, *args: Any, **more: Any) -> None:
        after_pass(self, *args, **more)
        told.append(job_run.status().eta_s)

    def added(self: TimeLeft, passes: Iterable[PassDone]) -> None:
        known = list(passes)
        numbers.extend(done.number for done in known)
        add(self, known)

    monkeypatch.setattr(TimeLeft, "add", added)
    monkeypatch.setattr(Course, "after_pass", asked)
    assert job_run.status().eta_s is None, "nothing is planned yet"
    job_run.execute()
    assert len(told) > 2 and all(eta_s is not None for eta_s in told)
    assert told[0] and told[0] > 0
    assert numbers == list(range(1, len(told) + 1)), "each pass is learnt from once"
    assert job_run.status().eta_s == 0.0


def test_how_long_a_run_took_is_the_same_however_late_it_is_asked(
    tmp_path: Path, model: Path
) -> None:
    ended = run(write(tmp_path, model, rows(3), **GREEDY))
    assert ended.status().elapsed_s == ended.status().elapsed_s > 0
