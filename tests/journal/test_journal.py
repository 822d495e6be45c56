"""Journals of one run and of many: nothing that was said to be kept is lost, and nothing comes
back that was not."""

import errno
import hashlib
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import StorageError
from moebatch.journal import files, writer
from moebatch.journal.files import _DRAFT, Files, replacing, storage_errors, take_room
from moebatch.journal.finished import Finished, journals
from moebatch.journal.record import Record, State, encode
from moebatch.journal.writer import JournalWriter
from tests.journal.faults import FaultyFiles, Noted
from tests.patience import PATIENCE_S


def key(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def record(number: int, text: str = "", state: State = "done") -> Record:
    return Record(key(number), number, state, b'{"row":%d,"text":"%s"}' % (number, text.encode()))


def found(folder: Path, count: int) -> dict[int, tuple[State, bytes]]:
    """By number, what journals say of the first rows."""
    said = {}
    with Finished(folder) as finished:
        for number in range(count):
            best = finished.find(key(number))
            if best is not None:
                assert best.name == number
                said[number] = (best.state, finished.line(best.place))
    return said


def test_what_was_added_is_found(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal") as journal:
        for number in range(100):
            journal.add(record(number))
    assert found(tmp_path / "journal", 200) == {n: ("done", record(n).line) for n in range(100)}


def test_keys_that_share_a_half_are_keys_of_different_rows(tmp_path: Path) -> None:
    halves = (bytes(8), b"\xff" * 8)
    keys = [head + tail for head in halves for tail in halves]
    with JournalWriter(tmp_path) as journal:
        for number, key in enumerate(keys):
            journal.add(Record(key, number, "done", b"%d" % number))
    with Finished(tmp_path) as finished:
        places = [finished.find(key) for key in keys]
        assert [place and finished.line(place.place) for place in places] == [
            b"%d" % number for number in range(4)
        ]


def test_it_is_with_the_system_before_the_journal_is_closed(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal") as journal:
        journal.add(record(1))
        assert len(found(tmp_path / "journal", 5)) == 1


def test_a_run_without_rows_leaves_no_journal(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal"):
        pass
    assert journals(tmp_path / "journal") == []


def test_no_journal_is_no_rows(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere", 3) == {}


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["part", "fail", "done"]))),
        max_size=4,
    )
)
def test_success_beats_all_others_and_then_the_newest_counts(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[tuple[int, State]]]
) -> None:
    folder = tmp_path_factory.mktemp("journals") / "journal"
    expected: dict[int, tuple[State, bytes]] = {}
    for run, rows in enumerate(runs):
        with JournalWriter(folder) as journal:
            for place, (number, state) in enumerate(rows):
                new = record(number, f"{run}.{place}", state)
                journal.add(new)
                before = expected.get(number)
                if before is None or state == "done" or before[0] != "done":
                    expected[number] = (state, new.line)
    assert found(folder, 6) == expected


def test_the_newest_counts_also_where_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hour, line in (2, b"old"), (1, b"newer"), (0, b"newest"):
        monkeypatch.setattr(writer.time, "time_ns", lambda hour=hour: hour * 3600 * 10**9)
        with JournalWriter(tmp_path) as journal:
            journal.add(Record(key(0), 0, "part", line))
    assert found(tmp_path, 1) == {0: ("part", b"newest")}


@given(st.integers(0, 10**6))
def test_a_journal_that_was_cut_off_anywhere_has_all_that_is_whole(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    records = [record(number, "x" * (number * 37 % 90)) for number in range(8)]
    data = b"".join(map(encode, records))
    cut = seed % (len(data) + 1)
    (folder / "1.jsonl").write_bytes(data[:cut])
    ends = [len(b"".join(map(encode, records[: n + 1]))) for n in range(8)]
    whole = {n: ("done", records[n].line) for n in range(8) if ends[n] <= cut}
    assert found(folder, 8) == whole
    with Finished(folder) as finished:
        assert finished.num_damaged == 0, "a torn end is no damage"


def test_a_damaged_record_in_the_middle_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = [encode(record(number)) for number in range(3)]
    lines[1] = lines[1].replace(b'"row":1', b'"row":7')
    (tmp_path / "1.jsonl").write_bytes(b"".join(lines))
    assert found(tmp_path, 3).keys() == {0, 2}
    with Finished(tmp_path) as finished:
        assert finished.num_damaged == 1


def test_a_record_that_changes_while_it_is_used_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(encode(record(1)))
    with Finished(tmp_path) as finished:
        best = finished.find(key(1))
        assert best is not None
        path.write_bytes(encode(record(1)).replace(b'"row":1', b'"row":7'))
        with pytest.raises(StorageError, match=r"1.jsonl: byte 0 was changed"):
            finished.line(best.place)
        path.write_bytes(b"")
        with pytest.raises(StorageError, match=r"1.jsonl: byte 0 was changed"):
            finished.line(best.place)


def test_records_that_come_in_pieces_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, place: read(file, min(size, 7), place))
    (tmp_path / "1.jsonl").write_bytes(encode(record(1, "long" * 9)))
    assert found(tmp_path, 2) == {1: ("done", record(1, "long" * 9).line)}


def test_what_else_lies_beside_journals_is_none(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl.old").write_bytes(encode(record(1)))
    assert found(tmp_path, 2) == {}


def test_more_journals_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    num_journals = 400
    for number in range(num_journals):
        (tmp_path / f"{number:03d}.jsonl").write_bytes(encode(record(number)))
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * num_open + 40, most))
    try:
        for _ in range(2):
            assert found(tmp_path, num_journals).keys() == set(range(num_journals))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def test_a_quota_is_named_instead_of_the_free_bytes_of_a_disk_that_has_room(tmp_path: Path) -> None:
    files = FaultyFiles(2, number=errno.EDQUOT)
    with (
        pytest.raises(StorageError) as raised,
        storage_errors(tmp_path),
        replacing(files, tmp_path / "out.jsonl"),
    ):
        pass
    assert "no room left: " in str(raised.value) and " free" not in str(raised.value)


def test_a_full_disk_says_how_much_is_needed_and_keeps_what_was_there(tmp_path: Path) -> None:
    class Full(Files):
        def write(self, descriptor: int, data: bytes) -> int:
            if os.fstat(descriptor).st_size > 500:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(descriptor, data[:100])

    journal = JournalWriter(tmp_path / "journal", files=Full())
    with pytest.raises(StorageError, match=r"no room left: .* to write, .* free"):
        for number in range(100):
            journal.add(record(number))
    journal.close()
    assert 2 <= len(found(tmp_path / "journal", 100)) == number


def test_what_comes_after_half_a_record_is_whole(tmp_path: Path) -> None:
    class FullOnce(Files):
        writes = iter(["all", "half", "none"])

        def write(self, descriptor: int, data: bytes) -> int:
            kind = next(self.writes, "all")
            if kind == "none":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(descriptor, data[:40] if kind == "half" else data)

    with JournalWriter(tmp_path / "journal", files=FullOnce()) as journal:
        journal.add(record(1))
        with pytest.raises(StorageError, match="no room left"):
            journal.add(record(2))
        journal.add(record(3))
    assert found(tmp_path / "journal", 4).keys() == {1, 3}
    with Finished(tmp_path / "journal") as finished:
        assert finished.num_damaged == 0


def test_a_disk_that_fails_at_the_end_does_not_hide_why_it_ended(tmp_path: Path) -> None:
    class Failing(Files):
        def close(self, descriptor: int) -> None:
            super().close(descriptor)
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(KeyError), JournalWriter(tmp_path / "a", files=Failing()):
        raise KeyError
    with pytest.raises(StorageError), JournalWriter(tmp_path / "b", files=Failing()):
        pass


def test_a_disk_that_fails_behind_the_last_record_is_told(tmp_path: Path) -> None:
    class Failing(Files):
        def sync(self, descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    journal = JournalWriter(tmp_path / "journal", files=Failing())
    journal.add(record(1))
    with pytest.raises(StorageError, match="Input/output error"):
        journal.close()


def test_what_a_run_that_was_killed_has_begun_to_write_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.with_name(_DRAFT.format(path.name)).write_bytes(b"half")
    with replacing(Files(), path) as file:
        file.write(b"all")
    assert path.read_bytes() == b"all" and list(tmp_path.iterdir()) == [path]


def test_names_and_contents_outlive_a_loss_of_power(tmp_path: Path) -> None:
    files = Noted()
    with JournalWriter(tmp_path / "journal", files=files) as journal:
        assert files.asked == ["create", "sync journal"], "before the first record"
        journal.add(record(1))
    assert files.asked[2:] == ["sync"]
    files = Noted()
    with replacing(files, tmp_path / "out.jsonl") as file:
        file.write(b"all")
    assert files.asked == ["create", "sync", "replace", f"sync {tmp_path.name}"]


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def moved_and_made_again(folder: Path) -> None:
    """As by a sync that takes the place of a folder."""
    folder.rename(folder.with_name("moved"))
    shutil.copytree(folder.with_name("moved"), folder)


@pytest.mark.parametrize("remove", [removed, moved_and_made_again])
def test_a_folder_that_is_removed_meanwhile_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable[[Path], None]
) -> None:
    """As soon as the thread that has records written to the disk looks, which it does in time."""
    monkeypatch.setattr(writer, "COMMIT_S", 0.01)
    with (
        pytest.raises(StorageError, match="it was moved or removed meanwhile; put it back"),
        JournalWriter(tmp_path / "j") as journal,
    ):
        remove(tmp_path / "j")
        journal.add(record(0))
        journal._thread.join(PATIENCE_S)
        journal.add(record(1))
        pytest.fail("a record was taken although no reader will find it")


def _operations(folder: Path) -> int:
    counting = FaultyFiles(fails_at=-1)
    _write_rows(folder, counting)
    return counting.num_operations


def _write_rows(folder: Path, files: Files) -> int:
    """Returns how many rows were taken."""
    num_taken = 0
    try:
        with JournalWriter(folder, files=files) as journal:
            for number in range(6):
                journal.add(record(number))
                num_taken += 1
    except StorageError:
        pass
    return num_taken


@pytest.mark.parametrize("is_short", [False, True])
def test_whatever_operation_fails_what_was_taken_is_there_and_nothing_else(
    tmp_path: Path, is_short: bool
) -> None:
    for fails_at in range(1, _operations(tmp_path / "whole") + 3):
        folder = tmp_path / "journal"
        shutil.rmtree(folder, ignore_errors=True)
        num_taken = _write_rows(folder, FaultyFiles(fails_at, is_short=is_short))
        lines = {n: ("done", record(n).line) for n in range(num_taken)}
        assert found(folder, 6) == lines
        _write_rows(folder, Files())
        assert len(found(folder, 6)) == 6


def test_a_stop_is_heard_while_a_file_system_takes_its_time_to_take_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def take_and_stop(descriptor: int, start: int, num_bytes: int) -> None:
        taken.append(num_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", take_and_stop)
    with pytest.raises(KeyboardInterrupt):
        take_room(0, 2**40)
    assert sum(taken) < 2**30


@pytest.mark.parametrize("num_bytes", [0, 1, 2**20, 2**20 + 1])
def test_all_of_the_room_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(files, "_ROOM_BYTES", 2**18)
    with (tmp_path / "file").open("wb") as file:
        take_room(file.fileno(), num_bytes)
        status = os.fstat(file.fileno())
    assert status.st_size == num_bytes <= 512 * status.st_blocks
