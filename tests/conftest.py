"""Fixtures that several rooms share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.tiny import write_checkpoint

settings.register_profile("moebatch", deadline=None)  # timing never decides a test
settings.load_profile("moebatch")
NOT_TESTED = "NOT TESTED"
"""Begins the reason of a skip that the user should read."""


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What could not be tested on this machine is said, whatever the options."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)}
    for reason in sorted(reason for reason in reasons if NOT_TESTED in reason):
        terminalreporter.write_line(reason, yellow=True, bold=True)
