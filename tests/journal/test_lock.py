"""One run at a time, on file systems with locks and on those without."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from moebatch.errors import LockHeld, StorageError
from moebatch.journal import lock
from moebatch.journal.lock import RunLock
from tests.patience import until


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


def test_nobody_is_told_to_remove_the_lock_of_a_run_that_is_alive(tmp_path: Path) -> None:
    """The system lets go of the lock of one that is gone."""
    path = tmp_path / "lock"
    with RunLock(path, subject="x"), pytest.raises(LockHeld) as found:
        RunLock(path, subject="x")
    assert str(found.value).endswith("or choose another output.path")


def test_a_disk_that_fails_is_not_taken_for_one_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, kind: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StorageError, match="lock: cannot be locked: Input/output error"):
        RunLock(tmp_path / "lock", subject="x")


def test_a_run_that_is_refused_leaves_no_file_open(path: Path) -> None:
    with RunLock(path, subject="x"):
        before = {*Path("/proc/self/fd").iterdir()}
        with pytest.raises(LockHeld):
            RunLock(path, subject="x")
        assert {*Path("/proc/self/fd").iterdir()} == before


def test_on_a_full_disk_it_is_held_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with RunLock(tmp_path / "lock", subject="x"), pytest.raises(LockHeld):
        RunLock(tmp_path / "lock", subject="x")


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


@pytest.mark.parametrize("written", ["[4242]", "{", ""])
def test_what_is_no_name_is_told_as_none(path: Path, written: str) -> None:
    with RunLock(path, subject="x"):
        path.write_text(written)
        with pytest.raises(LockHeld, match="x: runs of its shards are using it"):
            RunLock(path, subject="x")


def test_runs_that_share_it_bear_each_other(path: Path) -> None:
    with RunLock(path, subject="x", shared=True), RunLock(path, subject="x", shared=True):
        pass


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in for a lock of ``lock`` on a file system that has none."""

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: None)
    return tmp_path / "lock.held"


def beat(stand_in: Path, ago_s: float) -> None:
    """As the clock of its holder's host has it."""
    then = time.time() - ago_s
    os.utime(stand_in, (then, then))


def test_without_locks_a_holder_that_is_gone_is_followed(tmp_path: Path, stand_in: Path) -> None:
    stand_in.touch()
    with pytest.raises(LockHeld, match=f"rm {stand_in}"):
        RunLock(tmp_path / "lock", subject="x")
    beat(stand_in, ago_s=1000)
    with RunLock(tmp_path / "lock", subject="x"):
        assert stand_in.stat().st_mtime > time.time() - 500
    assert not stand_in.exists()


def test_without_locks_a_holder_that_ends_while_it_is_listened_to_is_followed(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.touch()
    beat(stand_in, ago_s=1000)
    listens = iter([True])
    monkeypatch.setattr(lock.time, "sleep", lambda _: next(listens, False) and stand_in.unlink())
    with RunLock(tmp_path / "lock", subject="x"):
        assert stand_in.exists()


def test_without_locks_a_full_disk_is_said(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def full(path: Path, *arguments: int) -> int:
        if path == stand_in:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(StorageError, match="held: cannot be locked: Disk quota exceeded"):
        RunLock(tmp_path / "lock", subject="x")


def test_without_locks_of_two_that_follow_the_later_one_gets_it(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found that the holder is gone, and one removes what the other has just created."""
    stand_in.touch()
    beat(stand_in, ago_s=1000)
    listens = iter([True])

    def sleep(seconds: float) -> None:
        if not next(listens, False):
            stand_in.unlink()
            stand_in.touch()

    monkeypatch.setattr(lock.time, "sleep", sleep)
    with pytest.raises(LockHeld, match=f"rm {stand_in}"):
        RunLock(tmp_path / "lock", subject="x")
    assert stand_in.exists()


def test_without_locks_its_holder_is_heard_of(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_HEARTBEAT_S", 0.01)
    with RunLock(tmp_path / "lock", subject="x"):
        beat(stand_in, ago_s=1000)
        until(lambda: stand_in.stat().st_mtime > time.time() - 500)


def test_without_locks_only_one_of_those_that_follow_gets_it(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have removed what was left of it and have taken it, each time that this one tried."""
    stand_in.touch()
    beat(stand_in, ago_s=1000)
    unlink = Path.unlink

    def taken_again(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        path.touch()
        beat(path, ago_s=1000)

    monkeypatch.setattr(Path, "unlink", taken_again)
    with pytest.raises(LockHeld, match=f"rm {stand_in}"):
        RunLock(tmp_path / "lock", subject="x")


@pytest.mark.parametrize("slow_s", [1000, -1000])
def test_without_locks_a_holder_whose_clock_is_another_is_not_taken_for_gone(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    stand_in.touch()
    beat(stand_in, slow_s + 9)

    def listen(seconds: float) -> None:
        if seconds > 2 * lock._HEARTBEAT_S:  # one may come late
            beat(stand_in, slow_s)

    monkeypatch.setattr(lock.time, "sleep", listen)
    with pytest.raises(LockHeld, match=f"rm {stand_in}"):
        RunLock(tmp_path / "lock", subject="x")


def test_without_locks_a_folder_that_is_gone_by_the_end_is_no_fault_of_the_lock(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of the network says so in words of its own."""

    def stale(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "unlink", stale)
    with RunLock(tmp_path / "lock", subject="x"):
        pass


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
    before = {*Path("/proc/self/fd").iterdir()}
    with (
        RunLock(path, subject="out"),
        pytest.raises(LockHeld),
        RunLock(path, subject="out"),
    ):
        pass
    assert {*Path("/proc/self/fd").iterdir()} == before


def test_without_locks_a_holder_that_was_taken_for_gone_leaves_what_the_next_one_holds(
    tmp_path: Path, stand_in: Path
) -> None:
    """As one that was suspended for longer than its heart may be silent."""
    with RunLock(tmp_path / "lock", subject="x"):
        beat(stand_in, ago_s=1000)
        follower = RunLock(tmp_path / "lock", subject="x")
    assert stand_in.exists()
    follower.release()
    assert not stand_in.exists()
