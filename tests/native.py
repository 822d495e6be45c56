"""The kernels in C for tests: a library is compiled once, though many processes want it at once."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread

import pytest

from moebatch.model.native import instruction_set, loader
from moebatch.model.native.compiler import cache_folder, may_keep
from moebatch.model.native.instruction_set import INSTRUCTION_SETS, InstructionSet
from moebatch.model.native.kernels import Kernels

HERE = INSTRUCTION_SETS[INSTRUCTION_SETS.index(instruction_set.highest()) :]
"""Instruction sets that this processor has, the best one first."""
SETS = [HERE[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in HERE[1:])]
"""For tests of each. A compiler takes ten seconds for one: `make test` has the best, and
`make test-all` the others."""


@cache
def load(name: InstructionSet) -> Kernels | str:
    """Those of an instruction set, or why there are none. Where another process compiles them, this
    one waits for it."""
    with _alone(name):
        return loader.load({**os.environ, instruction_set.VARIABLE: name})


def load_chosen() -> Kernels | str:
    """Those that everything uses which does not ask for a set."""
    return load(instruction_set.chosen(os.environ))


def kernels() -> Kernels | None:
    """`loader.kernels`, as tests ask for them while they are collected."""
    load_chosen()
    return loader.kernels()


def kernels_of(name: InstructionSet) -> Kernels:
    """For a test that cannot do without. Where there is a compiler, there have to be kernels."""
    found = load(name)
    if isinstance(found, Kernels):
        return found
    if not found.startswith("there is no C compiler"):
        pytest.fail(found)
    pytest.skip(found)


def compile_ahead() -> None:
    """Has a thread compile what tests will want, while test processes start."""

    def compile_all() -> None:
        for name in dict.fromkeys((instruction_set.chosen(os.environ), HERE[0])):
            load(name)

    Thread(target=compile_all, name="compiler").start()


@contextmanager
def _alone(name: InstructionSet) -> Iterator[None]:
    """One process at a time, where there is a folder that keeps what is compiled."""
    folder = cache_folder(os.environ)
    if folder is None or not may_keep(folder):
        yield
        return
    with (folder / f".tests-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
