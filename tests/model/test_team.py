"""Threads that share the work of compiled kernels."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    """Each call ends when as many have met in it as it asks for."""
    for number in range(12):
        time.sleep(0.002 * (number % 3))  # longer than they stay awake, or not
        size = 2 + number % 3
        met = threading.Barrier(size, timeout=60)
        share(lambda _, met=met: met.wait(), size)
        assert not met.broken


def test_whoever_calls_while_another_one_does_works_alone() -> None:
    begun, ended, callers = threading.Event(), threading.Event(), list[int]()
    other = threading.Thread(target=share, args=(lambda _: (begun.set(), ended.wait(60)), 2))
    other.start()
    assert begun.wait(60)
    share(lambda _: callers.append(threading.get_native_id()), 4)
    ended.set()
    other.join()
    assert callers == [threading.get_native_id()]


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


def share(work: Callable[[Any], Any], num_threads: int) -> None:
    """Has Python called by so many threads, in place of a kernel."""
    assert isinstance(KERNELS, Kernels)

    def call(argument: int | None) -> None:
        work(argument)

    KERNELS.norm._share(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call), None, num_threads)


def blocked(thread: Path) -> set[int]:
    lines = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
    mask = int(lines["SigBlk"], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
