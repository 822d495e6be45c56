"""What a run says of itself while it goes on and after it has ended."""

import json
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from moebatch.errors import Stopped, StorageError
from moebatch.folder.shard import ALL, Shard
from moebatch.job.overview import Overview, ShardOverview
from moebatch.job.status import RunStatus
from moebatch.job.status_file import ShardStatus, read_status, written_to


def status() -> RunStatus:
    return RunStatus(budget_bytes=1)


def stop_a_run(path: Path, *, has_gained: bool) -> int:
    with pytest.raises(Stopped) as stopped, written_to(path, ALL, status):
        raise Stopped("out of time", has_gained=has_gained)
    return stopped.value.num_fruitless


def test_runs_in_a_row_that_gain_nothing_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert [stop_a_run(path, has_gained=False) for _ in range(3)] == [1, 2, 3]
    assert stop_a_run(path, has_gained=True) == 0
    assert stop_a_run(path, has_gained=False) == 1


def test_a_run_that_ends_leaves_word(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with written_to(path, ALL, status):
        pass
    there = read_status(path)
    assert there is not None
    assert (there.state, there.is_alive) == ("done", False)
    with pytest.raises(ZeroDivisionError), written_to(path, ALL, status):
        raise ZeroDivisionError
    there = read_status(path)
    assert there is not None and there.state == "failed"


def test_without_room_nothing_empty_is_left(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with written_to(path, ALL, status):
        said = path.read_text()
        with _files_of_at_most(10), written_to(path, ALL, status):
            pass
        assert path.read_text() == said
        assert list(tmp_path.iterdir()) == [path]


def test_without_room_for_another_file_a_run_leaves_word_of_its_end(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with written_to(path, ALL, status):
        num_bytes = len(path.read_text())
    moments = iter([status(), replace(status(), num_rows=10**60)])
    with (
        pytest.raises(StorageError),
        _files_of_at_most(num_bytes + 30),
        written_to(path, ALL, partial(next, moments)),
    ):
        raise StorageError("no room left")
    there = read_status(path)
    assert there is not None and (there.state, there.rows) == ("failed", 0)


@contextmanager
def _files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writing more fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("shard", ["\x1b[2J", "a/b", "1/" + "9" * 5000, "1", 7])
def test_a_file_of_no_shard_counts_as_none(tmp_path: Path, shard: object) -> None:
    path = tmp_path / "status-1-of-1.json"
    with written_to(path, ALL, status):
        pass
    assert read_status(path) is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shard": shard}))
    assert read_status(path) is None


def test_a_file_with_other_values_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    stop_a_run(path, has_gained=False)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "fruitless": "many"}))
    assert read_status(path) is None
    assert stop_a_run(path, has_gained=False) == 1


def shard(number: int, *, rows: int, done: int, eta_s: float, age_s: float = 5.0) -> ShardStatus:
    return ShardStatus(
        shard=f"{number}/2",
        state="running",
        rows=rows,
        done=done,
        failed=0,
        rows_per_s=1.0,
        tokens_per_s=40.0,
        host="here",
        pid=1,
        job_id=None,
        updated=time.time() - age_s,
        eta_s=eta_s,
    )


def eta_of(*runs: ShardStatus) -> float | None:
    shards = (
        ShardOverview(
            shard=Shard(number, 2), num_rows=run.rows, num_done=run.done, num_failed=0, run=run
        )
        for number, run in enumerate(runs, start=1)
    )
    job = Overview(
        output="out.jsonl",
        has_output=False,
        num_rows=200,
        num_done=120,
        num_failed=0,
        num_begun=0,
        shards=tuple(shards),
    )
    return job.eta_s


def test_a_run_says_how_long_it_has_left(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with written_to(path, ALL, lambda: replace(status(), eta_s=90.0)):
        pass
    there = read_status(path)
    assert there is not None and there.left_s == pytest.approx(90.0, abs=5.0)
    with written_to(path, ALL, status):
        pass
    there = read_status(path)
    assert there is not None and there.left_s is None


def test_a_job_lasts_as_long_as_the_last_of_its_shards_at_work() -> None:
    ours, theirs = (
        shard(1, rows=100, done=90, eta_s=60),
        shard(2, rows=100, done=30, eta_s=500, age_s=20),
    )
    assert eta_of(ours, theirs) == pytest.approx(480, abs=2)
    assert eta_of(ours, replace(theirs, eta_s=-1.0)) is None, "one of them does not know"
    assert eta_of(ours) is None, "no run has the rows of the other one"
    assert eta_of(ours, replace(theirs, state="stopped")) is None
