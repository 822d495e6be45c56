"""Being asked to stop, before there is anything to interrupt."""

import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from moebatch.cli import process
from moebatch.cli.process import stopping_on_signals
from moebatch.errors import ExitCode, Stopped
from moebatch.job import attempt
from moebatch.job.attempt import Attempt
from moebatch.job.opened import OpenedJob
from moebatch.job.stop import Stop, StopNow
from moebatch.schedule.registry import find_schedule
from tests.job.test_resume import GREEDY, rows, run, write
from tests.patience import PATIENCE_S


def test_a_library_that_holds_back_exceptions_does_not_hold_back_a_stop() -> None:
    stop, went_on = Stop(), False
    with pytest.raises(Stopped, match="SIGTERM; nothing was computed yet"), stop.heard():
        try:
            stop.ask("SIGTERM")
        except Exception:  # as libraries do around imports
            went_on = True
    assert not went_on


def test_what_a_library_makes_of_being_broken_off_is_still_a_stop() -> None:
    stop = Stop()
    with pytest.raises(Stopped, match="SIGTERM; nothing was computed yet"), stop.heard():
        try:
            stop.ask("SIGTERM")
        except BaseException as error:
            raise ImportError("failed to import") from error  # as modules written in C do


class Finalised:
    """As modules written in Python have them: what is raised there gets no further."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_stop_that_is_held_back_where_an_object_is_finalised_is_obeyed_later_and_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    stop, went_on = Stop(), False
    refused = pytest.raises(Stopped, match="SIGTERM; nothing was computed yet")
    with refused, stopping_on_signals(stop), stop.heard():
        stop.obey()
        Finalised()
        went_on = True
        stop.obey()
    assert went_on
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("place", "name", "next_name"),
    [
        (OpenedJob, "reader_of", "_scan"),
        (Attempt, "_scan", "_measure"),
        (attempt, "plan_run", "_build"),
    ],
)
def test_a_stop_that_was_held_back_is_obeyed_before_what_takes_long(
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    next_name: str,
) -> None:
    stop, act, went_on = Stop(), getattr(place, name), False

    def held_back(*arguments: object) -> object:
        with suppress(StopNow):
            stop.ask("SIGTERM")
        return act(*arguments)

    def go_on(*arguments: object) -> None:
        nonlocal went_on
        went_on = True
        raise AssertionError("it was to stop before")

    monkeypatch.setattr(place, name, held_back)
    monkeypatch.setattr(Attempt, next_name, go_on)
    with pytest.raises(Stopped, match="SIGTERM; nothing was computed yet"):
        run(write(tmp_path / "job", tiny_checkpoint("mixtral"), rows(3), **GREEDY), stop)
    assert not went_on


def test_an_error_without_a_stop_stays_what_it_is() -> None:
    with pytest.raises(ImportError), Stop().heard():
        raise ImportError("no such module")


def test_while_something_can_be_interrupted_it_is_told_and_nothing_is_raised() -> None:
    stop, told = Stop(), queue.SimpleQueue[BaseException]()
    with stop.heard(), stop.deferred(told.put):
        stop.ask("SIGUSR1")
        assert str(told.get(timeout=PATIENCE_S)) == "SIGUSR1"
    assert stop.is_out_of_time


def test_what_was_kept_before_a_stop_at_once_is_told() -> None:
    stop = Stop(max_runtime_s=3600)
    with pytest.raises(Stopped, match="seven tokens are kept"), stop.heard():
        try:
            with stop.deferred(lambda error: None):
                stop.ask_in_time(at_once=True)
        except Stopped:
            raise Stopped("seven tokens are kept") from None


def test_a_stop_that_is_asked_for_once_more_says_why_it_was_asked_for_first() -> None:
    stop = Stop(max_runtime_s=3600)
    with pytest.raises(Stopped, match="SIGTERM; nothing"), stop.heard(), stop.held_back():
        stop.ask("SIGTERM")
        stop.ask_in_time(at_once=True)
    assert not stop.is_out_of_time


def test_after_what_failed_while_it_could_be_interrupted_a_stop_is_at_once_again() -> None:
    """As between a plan that the system has no memory for, and one for less."""
    stop, told = Stop(), queue.SimpleQueue[BaseException]()
    with suppress(MemoryError), stop.deferred(told.put):
        raise MemoryError
    with pytest.raises(Stopped, match="SIGTERM; nothing was computed yet"), stop.heard():
        stop.ask("SIGTERM")
    assert told.empty()


def test_what_has_ended_is_told_of_no_stop_and_the_run_goes_on() -> None:
    stop, told = Stop(), queue.SimpleQueue[BaseException]()
    with stop.deferred(told.put):
        pass
    assert told.empty()
    with stop.heard():
        stop.obey()


def test_a_stop_after_rows_have_ended_says_so_and_counts_as_progress() -> None:
    """As while the output is written."""
    stop = Stop()
    stop.gained("3 of 5 rows are done")
    with (
        pytest.raises(Stopped, match=r"SIGTERM\): 3 of 5 rows are done; run") as found,
        stop.heard(),
    ):
        stop.ask("SIGTERM")
    assert found.value.num_fruitless == 0


def test_a_time_that_no_clock_reaches_leaves_signals_heard() -> None:
    stop, told = Stop(max_runtime_s=1e18), queue.SimpleQueue[BaseException]()
    with stop.heard(), stop.deferred(told.put):
        stop.ask("SIGTERM")
        assert str(told.get(timeout=PATIENCE_S)) == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_run_ignores_ctrl_c_or_a_closed_terminal_if_its_shell_or_nohup_does_and_hears_all_else(
    number: signal.Signals,
) -> None:
    stop, before = Stop(), signal.signal(number, signal.SIG_IGN)
    try:
        with stopping_on_signals(stop), stop.deferred(lambda _: None):
            signal.raise_signal(number)
            assert stop.reason is None
            signal.raise_signal(signal.SIGUSR1)
            assert stop.reason == "SIGUSR1"
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    "names", [("SIGHUP", "SIGHUP"), ("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGTERM")]
)
def test_a_terminal_that_is_closed_is_no_second_signal(names: tuple[str, str]) -> None:
    """Shell and system both tell of it, and a session that ends has SIGTERM before or after."""
    stop = Stop()
    with stopping_on_signals(stop), stop.deferred(lambda _: None):
        for name in names:
            signal.raise_signal(getattr(signal, name))
        assert stop.reason == names[0]


def test_a_run_whose_time_is_over_stops_before_its_first_pass_as_well() -> None:
    stop = Stop(max_runtime_s=0.004)
    ended = pytest.raises(Stopped, match=r"the run has had its 4\.0ms; nothing was computed yet")
    with ended as found, stop.heard(), stopping_on_signals(stop):
        signal.sigtimedwait([], PATIENCE_S)  # what takes long
        raise AssertionError("it was to stop before")
    assert stop.is_out_of_time
    assert found.value.num_fruitless == 1


def test_a_signal_while_a_run_stops_since_its_time_is_over_is_the_first_one_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm's signal comes when it likes, as late as the clock."""
    stop, told = Stop(max_runtime_s=0.0), queue.SimpleQueue[BaseException]()
    ended: list[int] = []
    monkeypatch.setattr(process.os, "_exit", ended.append)
    with stop.deferred(told.put):
        assert "has had its" in str(told.get(timeout=PATIENCE_S))
    with stop.heard(), stopping_on_signals(stop):
        signal.raise_signal(signal.SIGUSR1)  # what there is of answers is being kept
        assert ended == []
        signal.raise_signal(signal.SIGUSR1)
        assert ended == [ExitCode.INTERRUPTED]
    assert stop.is_out_of_time


def test_a_file_of_the_users_own_is_broken_off_when_the_time_is_over_whatever_defers_a_stop(
    tmp_path: Path,
) -> None:
    """It may never come to an end, and then nothing else looks at the clock."""
    own, stop = tmp_path / "own.py", Stop(max_runtime_s=0.0)
    own.write_text(f"import signal\nsignal.sigtimedwait([], {PATIENCE_S})\n")
    over = pytest.raises(Stopped, match="the run has had its 0ms")
    with over, stop.deferred(lambda _: None), stopping_on_signals(stop):
        find_schedule(f"{own}:mine")
    assert stop.is_out_of_time


def test_what_cannot_be_broken_off_goes_on_to_its_end_and_no_further() -> None:
    for stop in (Stop(), Stop(max_runtime_s=0.0)):
        went_on = False
        with pytest.raises(Stopped, match="nothing was computed yet"), stop.heard():
            with stop.held_back():
                stop.ask_in_time() if stop.left_s == 0 else stop.ask("SIGTERM")
                went_on = True
            raise AssertionError("it was to stop before")
        assert went_on
    with Stop().held_back():
        pass


def test_a_signal_while_torch_is_loaded_waits_for_the_end_of_that(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """In the middle of it, it would end the process with a core dump."""
    job = write(tmp_path / "job", tiny_checkpoint("mixtral"), rows(3), **GREEDY)
    program = (
        "import signal, sys\n"
        "from moebatch.cli import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch.autograd':\n"
        "            signal.raise_signal(signal.SIGTERM)\n"
        "            print('went on')\n"
        "assert 'torch' not in sys.modules\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "run", str(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ExitCode.STOPPED, done.stderr
    assert done.stdout == "went on\n"
    assert "SIGTERM; nothing was computed yet" in done.stderr
