"""What garbage collection need not look through: it takes as long as there are objects, and holds
up every thread meanwhile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """While the block runs, no garbage is looked for: what modules make lasts, and is not looked
    through later either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def lasting() -> Iterator[None]:
    """What was there before the block is not looked through while it runs."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
