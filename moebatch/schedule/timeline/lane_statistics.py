"""What one lane did in a job of millions of tasks, without keeping them."""

import math
from dataclasses import dataclass, field, replace
from heapq import heappush, heapreplace

from moebatch.schedule.timeline.task_name import reason_kind
from moebatch.schedule.timeline.timeline import Bubble, Span

NUM_LONGEST = 5
"""Bubbles that are kept one by one."""
LAUNCH = "launch"
"""What a lane waited for while nothing had been launched for it."""


@dataclass(kw_only=True, slots=True)
class LaneStatistics:
    """Busy and idle time of a lane, added up span by span. One thread at a time may add."""

    lane: str
    since_s: float = 0.0
    """What was earlier does not count."""
    until_s: float = math.inf
    """Nor does what is later."""
    num_longest: int = NUM_LONGEST
    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)
    """Seconds of bubbles by the kind of what the lane waited for."""
    num_tasks: int = 0
    free_s: float = field(init=False)
    """When the last task had ended."""
    _heap: list[tuple[float, int, Bubble]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.free_s = self.since_s

    def add(self, span: Span) -> None:
        """Counts the next span of the lane; they come in the order in which they ran."""
        start_s = max(self.free_s, min(span.start_s, self.until_s))
        end_s = min(span.end_s, self.until_s)
        if start_s > self.free_s:
            self._add_bubble(start_s, span)
        if span.end_s > self.since_s:
            self.num_tasks += 1
        self.busy_s += max(0.0, end_s - start_s)
        self.free_s = max(start_s, end_s)

    @property
    def bubbles_s(self) -> float:
        """Seconds of all bubbles before tasks."""
        return sum(self.idle_s.values())

    @property
    def longest(self) -> list[Bubble]:
        """The longest bubbles, longest first."""
        entries = sorted(self._heap, key=lambda entry: entry[:2], reverse=True)
        return [bubble for _, _, bubble in entries]

    @property
    def main_reason(self) -> str | None:
        """The kind of what the lane waited for longest; None if it never waited."""
        return max(self.idle_s, key=lambda kind: self.idle_s[kind], default=None)

    def apart_from(self, kind: str) -> "LaneStatistics":
        """The same without bubbles of one kind."""
        kept = replace(self, idle_s={of: s for of, s in self.idle_s.items() if of != kind})
        kept.free_s = self.free_s
        kept._heap = [one for one in self._heap if reason_kind(one[2].waited_for) != kind]
        return kept

    def _add_bubble(self, end_s: float, span: Span) -> None:
        seconds, reason = end_s - self.free_s, span.waited_for or LAUNCH
        kind = reason_kind(reason)
        self.idle_s[kind] = self.idle_s.get(kind, 0.0) + seconds
        if len(self._heap) == self.num_longest and seconds <= self._heap[0][0]:
            return
        # Of equal ones the earliest stays, and the number keeps bubbles from being compared.
        entry = (seconds, -self.num_tasks, Bubble(self.lane, self.free_s, end_s, span.task, reason))
        keep = heappush if len(self._heap) < self.num_longest else heapreplace
        keep(self._heap, entry)
