"""Fixtures that several rooms share."""

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test processes share the cores, and so do the commands that they start: one thread each, and none
# that spins. Has to be said before torch is loaded.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
import torch

if not torch.cuda.is_available():
    # A CPU then does what a GPU would, slowly. Triton looks when it is loaded.
    os.environ["TRITON_INTERPRET"] = "1"

from tests.few import choose, mark_the_others
from tests.native import compile_ahead
from tests.tiny import write_checkpoint

NOT_TESTED = "NOT TESTED"
"""Begins the reason of a skip that the user should read."""


def pytest_configure(config: pytest.Config) -> None:
    choose(runs_all="not exhaustive" not in config.getoption("markexpr"))
    if config.getoption("numprocesses", None):
        compile_ahead()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """What runs in this process and would compute with more threads, jobs for one, does not."""
    with pytest.MonkeyPatch.context() as always:
        always.setattr(torch, "set_num_threads", lambda number: None)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tests.tiny.write_checkpoint` without the folder; equal calls share one, so only read it."""
    written: dict[str, Path] = {}

    def write(family: str = "mixtral", **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp(family), family, **options)
        return written[key]

    return write


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Thousands of tests are made, and stay to the end: nothing to look for again and again."""
    gc.disable()
    gc.set_threshold(50_000, 20, 50)  # reference counts free nearly all that tests make
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """At its end Python looks for cycles everywhere again: what it does not find counts as leaked,
    and nanobind names it all."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before those that are asked for by their marks are chosen."""
    mark_the_others(items)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What could not be tested on this machine is said, whatever the options."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)}
    for reason in sorted(reason for reason in reasons if NOT_TESTED in reason):
        terminalreporter.write_line(reason, yellow=True, bold=True)
