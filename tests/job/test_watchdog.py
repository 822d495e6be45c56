"""A run that stands still says what it is doing."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moebatch.checkpoint.direct import DirectFile
from moebatch.job.stop import watched
from moebatch.spec.request import Outcome
from tests.engine.test_engine import engine, policy, requests
from tests.patience import PATIENCE_S, until


class Looks:
    """What is watched, and when it was looked at; it moves only when it is told to."""

    def __init__(self) -> None:
        self.place = 0
        self.at_s: list[float] = []

    def __call__(self) -> int:
        self.at_s.append(time.monotonic())
        return self.place

    def go_on(self, seconds: float) -> None:
        """Returns when it has been looked at for so long from now on."""
        now_s = time.monotonic()
        until(lambda: self.at_s[-1] > now_s + seconds)


def test_what_stands_still_is_said_once() -> None:
    said, at_s, looks = list[str](), list[float](), Looks()

    def log(line: str) -> None:
        at_s.append(time.monotonic())
        said.append(line)

    with watched(looks, lambda: "the disk reads expert 3", log, patience_s=0.05):
        until(lambda: said)
        looks.go_on(0.2)
    assert len(said) == 1 and at_s[0] - looks.at_s[0] >= 0.05
    assert said[0].startswith("warning: nothing has moved for")
    assert said[0].endswith("the disk reads expert 3")


def test_what_moves_is_left_alone() -> None:
    said, looks = list[str](), Looks()
    with watched(lambda: (looks(), len(looks.at_s)), lambda: "", said.append, patience_s=0.05):
        looks.go_on(0.2)
    assert said == []


def test_what_stands_still_again_is_said_again() -> None:
    said, looks = list[str](), Looks()
    with watched(looks, lambda: "nothing", said.append, patience_s=0.05):
        until(lambda: len(said) == 1)
        looks.place = 1
        until(lambda: len(said) == 2)


def test_when_the_disk_hangs_the_task_that_waits_for_it_is_named(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    over, real = threading.Event(), DirectFile.read

    def hang(self: DirectFile, target: memoryview, offset: int) -> None:
        over.wait(PATIENCE_S)
        real(self, target, offset)

    with engine(tiny_checkpoint("mixtral"), policy(num_slots=2, resident=0)) as built:
        monkeypatch.setattr(DirectFile, "read", hang)
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.extend(built.engine.run(requests([5]))))
        thread.start()
        until(lambda: "launching: waits for" in built.engine.doing())
        said: list[str] = []
        with watched(
            lambda: built.engine.num_ended, built.engine.doing, said.append, patience_s=0.2
        ):
            until(lambda: said)
        over.set()
        thread.join()
    assert len(outcomes) == 1
    assert "launching: waits for" in said[0]
    assert "expert" in said[0] or "layer" in said[0]
