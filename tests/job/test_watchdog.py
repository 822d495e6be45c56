"""A run that stands still says what it is doing."""

import time

from moebatch.job.watchdog import watched


def test_what_stands_still_is_said_once() -> None:
    said: list[str] = []
    with watched(lambda: 1, lambda: "the disk reads expert 3", said.append, patience_s=0.05):
        time.sleep(0.4)
    assert len(said) == 1
    assert said[0].startswith("warning: nothing has moved for")
    assert said[0].endswith("the disk reads expert 3")


def test_what_moves_is_left_alone() -> None:
    said: list[str] = []
    with watched(time.monotonic_ns, lambda: "", said.append, patience_s=0.05):
        time.sleep(0.2)
    assert said == []


def test_what_stands_still_again_is_said_again() -> None:
    moved, said = [0], list[str]()
    with watched(lambda: moved[0], lambda: "nothing", said.append, patience_s=0.05):
        for _ in range(2):
            time.sleep(0.3)
            moved[0] += 1
    assert len(said) == 2
