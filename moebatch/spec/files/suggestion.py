"""What a user may have meant by a name that does not exist."""

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher, get_close_matches
from textwrap import fill

ALL = "list"
"""A name that nothing has, which is answered with all that there are."""
_LINE = 100
_LONG = 400
"""Characters of names beyond which they have lines of their own."""


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


def names_instead(
    name: str,
    known: Iterable[str],
    *,
    spelled: Callable[[str], str] = str,
    most: int = 2,
    besides: str = "",
) -> str:
    """What else to give: the nearest of many names, and how to see all, which are shown where none
    is near; or something `besides`."""
    known = list(known)
    guess = "" if name == ALL else did_you_mean(name, known, spelled=spelled, most=most)
    if guess:
        shows = f"{guess} {ALL!r} in its place shows all {len(known)}"
        return f"{shows}; or give {besides}" if besides else shows
    listed = ", ".join(map(spelled, known))
    if len(listed) > _LONG:
        lines = fill(listed, _LINE, break_on_hyphens=False, break_long_words=False)
        listed = f"\n{lines}"
    return f"give {besides}, or one of {listed}" if besides else f"there are {listed}"


def _likeness(name: str, other: str) -> float:
    """As `get_close_matches` compares them."""
    return SequenceMatcher(None, other, name).ratio()
