"""Names of tasks in timelines, such as ``chunk(12, e5, part2)``, read back."""

import re

from moebatch.schedule.task import Kind, Task

_NAME = re.compile(r"([a-z ]+)\((\d+)((?:, (?:k|e|p|part) ?\d+)*)\)")
_PART = re.compile(r", (k|e|part|p) ?(\d+)")


def reason_kind(waited_for: str) -> str:
    """The kind of what was waited for: what stands before the parenthesis, or all of it."""
    return waited_for.partition("(")[0]


def task_named(name: str) -> Task | None:
    """The task whose `str` is `name`; None if that is no task, such as "launch"."""
    match = _NAME.fullmatch(name)
    if not match or match[1] not in set(Kind):
        return None
    parts = {sign: int(number) for sign, number in _PART.findall(match[3])}
    return Task(
        Kind(match[1]),
        int(match[2]),
        micro_batch=parts.get("k"),
        expert=parts.get("e"),
        page=parts.get("p"),
        part=parts.get("part"),
    )
