"""One run at a time, on file systems with locks and on those without."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from moebatch.errors import LockHeld
from moebatch.journal.lock import RunLock


@pytest.fixture(params=["locks", "no locks"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is to be locked: once as it is, once as if on a network file system that refuses."""
    if request.param == "no locks":

        def refuse(descriptor: int, kind: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
    return tmp_path / "lock"


def test_a_second_run_is_told_who_has_it(path: Path) -> None:
    with (
        RunLock(path, subject="out.jsonl"),
        pytest.raises(LockHeld, match=f"out.jsonl: .*process {os.getpid()}"),
    ):
        RunLock(path, subject="out.jsonl")


def test_it_is_free_again_afterwards(path: Path) -> None:
    for _ in range(3):
        with RunLock(path, subject="out.jsonl"):
            pass


def test_runs_that_share_it_are_not_taken_for_one_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text('{"pid": 4242, "host": "h", "start": "2020"}')
    with (
        RunLock(path, subject="x", shared=True),
        pytest.raises(LockHeld, match="runs of its shards"),
    ):
        RunLock(path, subject="x")


def test_runs_that_share_it_bear_each_other(path: Path) -> None:
    with RunLock(path, subject="x", shared=True), RunLock(path, subject="x", shared=True):
        pass


def test_without_locks_a_holder_that_is_gone_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path, stand_in = tmp_path / "lock", tmp_path / "lock.held"
    stand_in.touch()
    with pytest.raises(LockHeld, match=f"rm {stand_in}"):
        RunLock(path, subject="x")
    long_ago = time.time() - 1000
    os.utime(stand_in, (long_ago, long_ago))
    with RunLock(path, subject="x"):
        assert stand_in.stat().st_mtime > long_ago
    assert not stand_in.exists()


def test_a_lock_that_was_removed_before_it_was_got_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an earlier holder, which ends between opening and locking: others lock another file."""
    path, lock = tmp_path / "lock", fcntl.flock

    def removed_before(descriptor: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with (
        RunLock(path, subject="out"),
        pytest.raises(LockHeld),
        RunLock(path, subject="out"),
    ):
        pass
