"""Experts from disk on their way to main memory, under a level that computes (Klotski)."""

from collections.abc import Iterator

from moebatch.schedule.request import Fetch, Request
from moebatch.schedule.setup import Setup


def fetch_window(setup: Setup, i: int) -> Iterator[Request]:
    """While step i computes and i + 1 goes up from main memory, those of i + L come from disk."""
    for later in setup.next_moe(i, setup.window):
        yield Fetch(later)
