"""What a user may have meant by a name that does not exist."""

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher, get_close_matches


def did_you_mean(
    name: str, known: Iterable[str], *, spelled: Callable[[str], str] = str, most: int = 1
) -> str:
    """``did you mean dram or vram?``: the known names that are most like `name`, as they are to be
    `spelled`; `most` of them, and those that are as near as the last one. Empty where none is like
    it."""
    known = list(known)
    near = get_close_matches(name, known, n=max(1, len(known)))
    least = min((_likeness(name, one) for one in near[:most]), default=0.0)
    found = [spelled(one) for one in near if _likeness(name, one) >= least]
    return f"did you mean {' or '.join(found)}?" if found else ""


def _likeness(name: str, other: str) -> float:
    """As `get_close_matches` compares them."""
    return SequenceMatcher(None, other, name).ratio()
