"""Where in a YAML file something stands."""

from collections.abc import Iterable

Place = tuple[str | int, ...]
"""Way from the top to a value: keys of mappings, positions in lists."""
Findings = Iterable[tuple[Place, str]]
"""Places, and what is wrong there."""


def dotted(place: Place) -> str:
    """``sampling.stop[1]``: a place as the user would write it."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
