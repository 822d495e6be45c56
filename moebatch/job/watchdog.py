"""Notices a run that stands still."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from moebatch.units import format_duration

PATIENCE_S = 60.0


@contextmanager
def watched(
    moved: Callable[[], Hashable],
    doing: Callable[[], str],
    tell: Callable[[str], None],
    *,
    patience_s: float = PATIENCE_S,
) -> Iterator[None]:
    """While the block runs, `tell` gets what it is `doing` whenever what has `moved` has been the
    same for so long; once each time."""
    over = threading.Event()

    def watch() -> None:
        last, since, has_told = moved(), time.monotonic(), False
        while not over.wait(patience_s / 12):
            now = moved()
            if now != last:
                last, since, has_told = now, time.monotonic(), False
            elif not has_told and time.monotonic() - since >= patience_s:
                stood = format_duration(time.monotonic() - since)
                tell(f"warning: nothing has moved for {stood}: {doing()}")
                has_told = True

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
