"""When the system refuses memory that was promised, the run goes on with less of it."""

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moebatch.engine.engine import Engine
from moebatch.errors import OutOfMemory, Stopped, StorageError
from moebatch.job import attempt
from moebatch.job.options import RunOptions
from moebatch.job.run import JobRun
from moebatch.model.decoder import Decoder
from moebatch.spec.job import load_job
from moebatch.spec.request import Outcome, Request
from tests.job.test_resume import GREEDY, run, write

MANY: list[dict[str, object]] = [
    {"custom_id": f"r{i}", "prompt": [3 + i % 200] * (40 + i % 9), "max_tokens": 4}
    for i in range(300)
]


@pytest.fixture
def jobs(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    """One that is disturbed, and one that is not."""
    model = tiny_checkpoint("mixtral")
    cut, whole = (write(tmp_path / name, model, MANY, **GREEDY) for name in ("cut", "whole"))
    return cut, whole


def answers(job: Path) -> bytes:
    return (job.parent / "out.jsonl").read_bytes()


def said_by(job: Path) -> list[str]:
    said: list[str] = []
    JobRun(load_job(job), said.append, RunOptions()).execute()
    return said


def test_what_cannot_be_allocated_is_planned_again(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, whole = jobs
    run(whole)
    real, num_refused = mmap.mmap, 0

    def refusing(descriptor: int, length: int, **options: Any) -> mmap.mmap:
        nonlocal num_refused
        if num_refused < 2:
            num_refused += 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(descriptor, length, **options)

    monkeypatch.setattr(mmap, "mmap", refusing)
    said = [line for line in said_by(cut) if "going on" in line.lower()]
    assert [line.split("plan for ")[1] for line in said] == ["6.00 GiB", "4.50 GiB"]
    assert answers(cut) == answers(whole)


def test_what_fails_for_another_reason_while_weights_are_loaded_is_not_planned_again(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller plan would hide a disk that fails, and end no better."""
    job_run, phases = JobRun(load_job(jobs[0]), lambda line: None), list[str]()

    def failing(*arguments: object, **options: object) -> None:
        phases.append(job_run.status().phase)
        raise StorageError("model.safetensors: reading failed")

    monkeypatch.setattr(attempt, "build_engine", failing)
    with pytest.raises(StorageError, match="reading failed"):
        job_run.execute()
    assert phases == ["loading weights"]


def test_a_read_for_which_there_is_no_memory_is_planned_again(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, whole = jobs
    run(whole)
    real, refusals = os.preadv, iter([True])

    def refusing(*arguments: Any) -> int:
        if next(refusals, False):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", refusing)
    assert any("Cannot allocate memory. Going on with a plan for" in line for line in said_by(cut))
    assert answers(cut) == answers(whole)


@pytest.mark.exhaustive
def test_passes_that_stay_too_large_when_halved_are_planned_again(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, whole = jobs
    run(whole)
    calls = iter([False] * 30 + [True] * 4 + [False] * 10**6)
    real = Decoder.attend

    def refusing(self: Decoder, *arguments: object) -> object:
        if next(calls):
            raise MemoryError
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "attend", refusing)
    said = said_by(cut)
    assert any("even for a pass of" in line and "Going on with a plan for" in line for line in said)
    assert answers(cut) == answers(whole)


def test_rows_that_ended_before_it_went_on_are_those_of_this_run(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = Engine.run, iter([True])

    def refusing(self: Engine, requests: Iterable[Request]) -> Iterator[Outcome]:
        for number, outcome in enumerate(real(self, requests)):
            yield outcome
            if number == 2 and next(refusals, False):
                raise OutOfMemory("the system refuses memory")

    monkeypatch.setattr(Engine, "run", refusing)
    summary = JobRun(load_job(jobs[0]), lambda line: None).execute()
    assert (summary.num_rows, summary.num_ended) == (300, 300)
    assert summary.num_begun_again == 1
    assert summary.engine.generated_tokens < 4 * 300


def test_what_was_computed_before_it_went_on_is_gained_however_soon_it_stops(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ends = Engine.run, iter([OutOfMemory("the system refuses memory"), Stopped("the test")])

    def refusing(self: Engine, requests: Iterable[Request]) -> Iterator[Outcome]:
        end = next(ends)
        if isinstance(end, OutOfMemory):
            yield next(real(self, requests))
        raise end

    monkeypatch.setattr(Engine, "run", refusing)
    with pytest.raises(Stopped, match="1 of 300 rows are done") as found:
        run(jobs[0])
    assert found.value.num_fruitless == 0


def test_when_nothing_does_there_is_a_message(
    jobs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Decoder, *arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Decoder, "attend", refuse)
    with pytest.raises(OutOfMemory, match="nor is there a plan for less"):
        run(jobs[0])
