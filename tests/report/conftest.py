"""Screens are those of a terminal that can draw, wherever tests run."""

import pytest


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes the width of a console for no more than a hint where this says ``dumb``."""
    monkeypatch.setenv("TERM", "xterm")
