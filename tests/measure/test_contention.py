"""Time on the run queue is time that others took."""

from pathlib import Path

import pytest

from moebatch.measure.contention import Contention, Patience


def write(tasks: Path, thread: int, waited_ns: int) -> None:
    (tasks / str(thread)).mkdir(parents=True, exist_ok=True)
    (tasks / str(thread) / "schedstat").write_text(f"1 {waited_ns} 3\n")


def test_waiting_of_all_threads_counts(tmp_path: Path) -> None:
    write(tmp_path, 1, 10**9)
    write(tmp_path, 2, 10**9)
    contention = Contention(2, tmp_path)
    assert contention.share == 0
    write(tmp_path, 2, 10**15)
    assert contention.share == 1


def test_the_share_is_that_of_the_time_of_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 10.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    write(tmp_path, 1, 0)
    contention = Contention(4, tmp_path)
    write(tmp_path, 1, 10 * 10**9)  # one of four waits all of the time
    assert contention.share == 0.25


def test_threads_that_end_and_kernels_that_do_not_tell_count_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1, 10**12)
    contention = Contention(1, tmp_path)
    (tmp_path / "1" / "schedstat").unlink()
    assert contention.share == 0
    assert Contention(1, tmp_path / "missing").share == 0


def test_this_process_can_be_read() -> None:
    assert 0 <= Contention(1).share <= 1


class Steps:
    """Steps of which some are disturbed; each finds its own number."""

    def __init__(self, tasks: Path, disturbed: list[bool]) -> None:
        self._tasks = tasks
        self._disturbed = disturbed
        self.num_done = 0
        write(tasks, 1, 0)

    def __call__(self) -> int:
        waited_ns = 10**15 * (self.num_done + 1) if self._disturbed[self.num_done] else 0
        self.num_done += 1
        if waited_ns:
            write(self._tasks, 1, waited_ns)
        return self.num_done


@pytest.mark.parametrize(
    ("disturbed", "patience_s", "found", "num_done"),
    [
        ([False], 1e9, 1, 1),
        ([True, True, False], 1e9, 3, 3),
        ([True], 0.0, 1, 1),
        ([True, False], 1e-9, 2, 2),
        ([True, True], 1e-9, 1, 2),
    ],
)
def test_a_disturbed_step_is_repeated_while_patience_lasts(
    tmp_path: Path, disturbed: list[bool], patience_s: float, found: int, num_done: int
) -> None:
    steps = Steps(tmp_path, disturbed)
    patience = Patience(1, patience_s, tmp_path)
    assert patience.calmest(steps) == found
    assert steps.num_done == num_done
    assert patience.share == disturbed[found - 1]


def test_patience_is_shared_by_all_steps(tmp_path: Path) -> None:
    patience = Patience(1, 1e-9, tmp_path)
    first = Steps(tmp_path, [True, True])
    assert patience.calmest(first) == 1
    second = Steps(tmp_path, [True])
    patience.calmest(second)
    assert (first.num_done, second.num_done) == (2, 1)
    assert patience.share == 1


def test_nothing_measured_is_nothing_disturbed() -> None:
    assert Patience(1, 1.0).share == 0
