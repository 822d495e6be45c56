"""What lanes did, added up without keeping it: the same for a simulated timeline and for a night's
job of millions of tasks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import heappush, heapreplace
from itertools import chain

from moebatch.schedule.lanes import LANES, PROCESSORS, lane_of_row
from moebatch.schedule.task import reason_kind
from moebatch.schedule.timeline.timeline import Bubble, Span, Timeline, bubbles_before

NUM_LONGEST = 5
"""Bubbles that are kept one by one, of each kind of reason."""


@dataclass(kw_only=True, slots=True)
class LaneStatistics:
    """Busy and idle time of a lane, added up span by span. One thread at a time may add."""

    lane: str
    since_s: float = 0.0
    """What was earlier does not count."""
    until_s: float = math.inf
    """Nor does what is later."""
    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)
    """Seconds of bubbles by the kind of what the lane waited for."""
    num_tasks: int = 0
    free_s: float = field(init=False)
    """When the last task had ended."""
    _heaps: dict[str, list[tuple[float, float, Bubble]]] = field(default_factory=dict, init=False)
    """The longest bubbles of each kind of reason: many long ones of one leave room to others."""

    def __post_init__(self) -> None:
        self.free_s = self.since_s

    def add(self, span: Span) -> None:
        """Counts the next span of the lane; they come in the order in which they ran."""
        start_s = max(self.free_s, min(span.start_s, self.until_s))
        end_s = min(span.end_s, self.until_s)
        if start_s > self.free_s:
            for bubble in bubbles_before(span, self.free_s, start_s):
                self._add_bubble(bubble)
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
        entries = sorted(chain(*self._heaps.values()), key=lambda entry: entry[:2], reverse=True)
        return [bubble for _, _, bubble in entries[:NUM_LONGEST]]

    @property
    def main_reason(self) -> str | None:
        """The kind of what the lane waited for longest; None if it never waited."""
        return max(self.idle_s, key=lambda kind: self.idle_s[kind], default=None)

    def apart_from(self, kind: str) -> "LaneStatistics":
        """The same without bubbles of one kind."""
        kept = replace(self, idle_s={of: s for of, s in self.idle_s.items() if of != kind})
        kept.free_s = self.free_s
        kept._heaps = {of: heap for of, heap in self._heaps.items() if of != kind}
        return kept

    def _add_bubble(self, bubble: Bubble) -> None:
        seconds, kind = bubble.seconds, reason_kind(bubble.waited_for)
        self.idle_s[kind] = self.idle_s.get(kind, 0.0) + seconds
        heap = self._heaps.setdefault(kind, [])
        if len(heap) == NUM_LONGEST and seconds <= heap[0][0]:
            return
        # Of equal ones the earliest stays, and its start keeps bubbles from being compared.
        entry = (seconds, -bubble.start_s, bubble)
        keep = heappush if len(heap) < NUM_LONGEST else heapreplace
        keep(heap, entry)


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Busy and idle time by lane. Threads may add at the same time, each to a lane of its own."""

    num_layers: int
    since_s: float = 0.0
    """What was earlier does not count."""
    until_s: float = math.inf
    """When the job was done; as long as it is infinite, the end of the last task."""
    lanes: dict[str, LaneStatistics] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, timeline: Timeline, *, since_s: float = 0.0) -> "Statistics":
        """What the lanes of a timeline did from a moment on."""
        statistics = cls(num_layers=timeline.num_layers, since_s=since_s, until_s=timeline.length_s)
        for span in sorted(timeline.spans, key=lambda span: (span.start_s, span.end_s)):
            statistics.add(replace(span, lane=lane_of_row(span.lane)))
        return statistics

    def add(self, span: Span) -> None:
        """Counts a span; those of one lane come in the order in which they ran."""
        lane = self.lanes.get(span.lane)
        if lane is None:
            lane = self.lanes[span.lane] = LaneStatistics(
                lane=span.lane, since_s=self.since_s, until_s=self.until_s
            )
        lane.add(span)

    @property
    def length_s(self) -> float:
        """Seconds that are counted."""
        last_s = max((lane.free_s for lane in self.lanes.values()), default=self.since_s)
        return (self.until_s if math.isfinite(self.until_s) else last_s) - self.since_s

    def share(self, lane: str) -> float:
        """Part of the time in which a lane was busy, 0..1."""
        return self.lanes[lane].busy_s / self.length_s if self.length_s else 0.0

    def rest_s(self, lane: str) -> float:
        """Seconds from the last task of a lane to the end."""
        return max(0.0, self.since_s + self.length_s - self.lanes[lane].free_s)

    @property
    def bottleneck(self) -> str | None:
        """The busiest lane; None if none did anything."""
        return max(self.names, key=lambda lane: self.lanes[lane].busy_s, default=None)

    @property
    def names(self) -> list[str]:
        """Lanes that did something, in their fixed order."""
        return in_order(self.lanes)

    @property
    def main_lanes(self) -> list[str]:
        """Processors, and the busiest lane: those whose waits cost time."""
        main = {*PROCESSORS, self.bottleneck}
        return [lane for lane in self.names if lane in main]

    def longest_waits(self, lanes: Iterable[str], count: int) -> list[Bubble]:
        """The longest bubbles of some lanes, longest first; at most `NUM_LONGEST` of each."""
        found = [bubble for lane in lanes for bubble in self.lanes[lane].longest]
        return sorted(found, key=lambda bubble: -bubble.seconds)[:count]


def in_order(lanes: Iterable[str]) -> list[str]:
    """Names of lanes as they are shown: processors, links up and down, disk; unknown ones last."""
    known = {lane.name: place for place, lane in enumerate(LANES)}
    return sorted(lanes, key=lambda row: known.get(lane_of_row(row), len(known)))
