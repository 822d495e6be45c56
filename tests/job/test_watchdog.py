"""A run that stands still says what it is doing."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moebatch.job.watchdog import watched
from moebatch.spec.request import Outcome
from moebatch.store.direct import DirectFile
from tests.engine.test_engine import engine, policy, requests


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


def test_when_the_disk_hangs_the_task_that_waits_for_it_is_named(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    over, real = threading.Event(), DirectFile.read

    def hang(self: DirectFile, target: memoryview, offset: int) -> None:
        over.wait(20)
        real(self, target, offset)

    with engine(tiny_checkpoint("mixtral"), policy(num_slots=2, resident=0)) as built:
        monkeypatch.setattr(DirectFile, "read", hang)
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.extend(built.engine.run(requests([5]))))
        thread.start()
        said: list[str] = []
        with watched(
            lambda: built.engine.num_ended, built.engine.doing, said.append, patience_s=0.2
        ):
            time.sleep(1.5)
        over.set()
        thread.join()
    assert len(outcomes) == 1
    assert "launching: waits for" in said[0]
    assert "expert" in said[0] or "layer" in said[0]
