"""What is done every few seconds beside other work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def periodically(act: Callable[[], None], every_s: float, *, thread: str) -> Iterator[None]:
    """While the block runs, a thread of that name calls `act` every so many seconds, the first time
    when as many have passed."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            act()

    repeating = threading.Thread(target=repeat, name=thread, daemon=True)
    repeating.start()
    try:
        yield
    finally:
        over.set()
        repeating.join()
