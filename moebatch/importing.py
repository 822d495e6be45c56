"""Imports of many modules at once."""

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
