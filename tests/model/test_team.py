"""Threads that share the work of compiled kernels."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moebatch.model.native import loader
from moebatch.model.native.kernels import Kernels
from tests.model.test_products import multiplied, noise

KERNELS = loader.kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels")
PRODUCT = noise(1, 70, 256), noise(2, 512, 256), None
TASKS = Path("/proc/self/task")


def product(num_threads: int) -> Tensor:
    assert isinstance(KERNELS, Kernels)
    return multiplied(KERNELS, *PRODUCT, num_threads=num_threads)


def test_threads_that_sleep_and_threads_that_look_for_work_are_called() -> None:
    want = product(1)
    for number in range(60):
        time.sleep(0.002 * (number % 3))  # longer than they stay awake, or not
        assert torch.equal(product(1 + number % 5), want)


def test_several_may_call_at_the_same_time() -> None:
    want, are_equal = product(1), list[bool]()

    def call() -> None:
        are_equal.extend(torch.equal(product(3), want) for _ in range(100))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert are_equal == [True] * 400


def test_a_process_that_was_forked_off_has_threads_of_its_own() -> None:
    want = product(3)
    child = os.fork()
    if child == 0:
        is_equal, num_threads = torch.equal(product(3), want), len(list(TASKS.iterdir()))
        os._exit(0 if is_equal and num_threads >= 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_signals_are_left_to_other_threads() -> None:
    before = set(TASKS.iterdir())
    product(len(before) + 1)
    started = set(TASKS.iterdir()) - before
    assert started
    for thread in started:
        assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1} <= blocked(thread)


def blocked(thread: Path) -> set[int]:
    lines = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
    mask = int(lines["SigBlk"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
