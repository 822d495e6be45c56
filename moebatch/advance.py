"""How far long work is, for who watches it."""

from collections.abc import Callable
from functools import partial

Advance = Callable[[float], None]
"""Is told now and then what share is done, 0 to 1."""


def unwatched(share: float) -> None:
    """For work that nobody watches."""


def parts_of(advance: Advance, count: int) -> list[Advance]:
    """What each of several parts that follow each other tells its own share to."""
    return [partial(_tell_part, advance, number, count) for number in range(count)]


def _tell_part(advance: Advance, number: int, count: int, share: float) -> None:
    advance((number + share) / count)
