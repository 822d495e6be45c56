"""Threads that wait for different things on one lock."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from moebatch.store.monitor import Monitor
from tests.patience import PATIENCE_S


def started(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def sleeping(monitor: Monitor, count: int) -> None:
    """Returns when so many threads sleep."""
    while True:
        with monitor:
            if len(monitor._sleepers) == count:
                return


def test_whoever_changes_something_wakes_only_those_that_can_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing else wakes them.
    monkeypatch.setattr("moebatch.store.monitor._STRETCH_S", threading.TIMEOUT_MAX)
    monitor, things, looked = Monitor(), list[str](), list[str]()

    def wait(name: str) -> None:
        def is_there() -> bool:
            looked.append(threading.current_thread().name)
            return name in things

        with monitor:
            monitor.wait_for(is_there)
            things.append(f"{name} seen")

    threads = [started(lambda name=name: wait(name)) for name in ("a", "b", "c")]
    sleeping(monitor, 3)
    looked.clear()
    with monitor:
        things.append("b")
        monitor.changed()
    threads[1].join(PATIENCE_S)
    assert things == ["b", "b seen"] and not threads[1].is_alive()
    # All three were looked at by the one that changed something; the one that woke looked again.
    assert looked == [threading.current_thread().name] * 3 + [threads[1].name]
    with monitor:
        things.extend("ac")
        monitor.changed()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(things) == ["a", "a seen", "b", "b seen", "c", "c seen"]


def test_a_thing_is_taken_once() -> None:
    monitor, things, taken = Monitor(), list[int](), list[int]()

    def take() -> None:
        with monitor:
            taken.append(monitor.take(lambda: things.pop() if things else None))

    threads = [started(take) for _ in range(4)]
    sleeping(monitor, 4)
    for number in range(4):
        with monitor:
            things.append(number)
            monitor.changed()
            monitor.changed()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(taken) == [0, 1, 2, 3]


def test_what_is_there_already_is_not_waited_for() -> None:
    monitor = Monitor()
    with monitor:
        assert monitor.take(lambda: 0) == 0  # false, but not nothing
        monitor.wait_for(lambda: True)
    assert not monitor._sleepers


class Heard(Exception):
    """A signal."""


def test_a_signal_is_handled_while_the_main_thread_sleeps_whichever_thread_gets_it() -> None:
    monitor, is_handled, things = Monitor(), threading.Event(), list[int]()

    def handle(number: int, frame: object) -> None:
        assert not things, "it was handled when the wait was over"
        raise Heard

    def get_it() -> None:
        sleeping(monitor, 1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        is_handled.wait(PATIENCE_S)
        with monitor:
            things.append(1)
            monitor.changed()

    before = signal.signal(signal.SIGUSR1, handle)
    thread = started(get_it)
    try:
        with pytest.raises(Heard), monitor:
            monitor.wait_for(lambda: bool(things))
    finally:
        signal.signal(signal.SIGUSR1, before)
        is_handled.set()
        thread.join(PATIENCE_S)
    assert not monitor._sleepers


def test_what_goes_wrong_is_raised_where_it_is_waited_for() -> None:
    monitor, broken, errors = Monitor(), list[bool](), list[str]()

    def is_there() -> bool:
        if broken:
            raise ValueError("broken")
        return False

    def wait() -> None:
        with monitor, pytest.raises(ValueError, match="broken"):
            monitor.wait_for(is_there)
        errors.append("seen")

    thread = started(wait)
    sleeping(monitor, 1)
    with monitor:
        broken.append(True)
        monitor.changed()
    thread.join(PATIENCE_S)
    assert errors == ["seen"] and not monitor._sleepers


def test_a_lock_that_is_held_twice_is_given_up_while_sleeping() -> None:
    monitor, things = Monitor(), list[int]()

    def give() -> None:
        with monitor:
            things.append(1)
            monitor.changed()

    with monitor, monitor:
        thread = started(give)
        monitor.wait_for(lambda: bool(things))
    thread.join(PATIENCE_S)


def test_of_sleepers_that_look_for_the_same_one_is_asked_where_it_finds_nothing() -> None:
    monitor, things, asked = Monitor(), list[int](), list[str]()
    alike = object()

    def take() -> None:
        def find() -> int | None:
            asked.append(threading.current_thread().name)
            return things.pop() if things else None

        with monitor:
            monitor.take(find, alike=alike)

    threads = [started(take) for _ in range(3)]
    sleeping(monitor, 3)
    asked.clear()
    with monitor:
        monitor.changed()
        assert len(asked) == 1
        things.extend((1, 2))
        monitor.changed()
        # Two of them take something, and the third is asked in vain.
        assert len(asked) == 1 + 3 and not things
        things.append(3)
        monitor.changed()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_no_handler_comes_between_the_lock_and_its_block() -> None:
    """What it raises would leave the lock to a thread that waits for others then. Handlers run
    between steps of Python: there are none."""
    monitor, called = Monitor(), list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with monitor:
            pass
    finally:
        sys.setprofile(before)
    assert called == []
