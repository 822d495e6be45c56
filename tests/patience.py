"""Waiting in tests: for what will come, however busy the machine is."""

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""What takes longer hangs. It ends nothing else, so that time never decides a test."""
_LOOK_S = 0.005


def until(condition: Callable[[], object]) -> None:
    """Returns when something has become true. Raises AssertionError where that does not come."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it has not come to that"
        time.sleep(_LOOK_S)
