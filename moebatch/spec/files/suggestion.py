"""What a user may have meant by a name that does not exist."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches


def did_you_mean(
    name: str, known: Iterable[str], *, spelled: Callable[[str], str] = str, most: int = 1
) -> str:
    """``did you mean dram or vram?``: the known names that are most like `name`, as they are to be
    `spelled`; empty where none is like it."""
    near = [spelled(found) for found in get_close_matches(name, list(known), n=most)]
    return f"did you mean {' or '.join(near)}?" if near else ""
