"""What all lanes did, added up: the same for a simulated timeline and for a night's job."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from moebatch.schedule.lanes import LANES
from moebatch.schedule.timeline.lane_statistics import NUM_LONGEST, LaneStatistics
from moebatch.schedule.timeline.timeline import Bubble, Span, Timeline

PROCESSORS = ("gpu", "cpu")
"""Lanes that compute."""


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Busy and idle time by lane. Threads may add at the same time, each to a lane of its own."""

    num_layers: int
    since_s: float = 0.0
    """What was earlier does not count."""
    until_s: float = math.inf
    """When the job was done; as long as it is infinite, the end of the last task."""
    num_longest: int = NUM_LONGEST
    lanes: dict[str, LaneStatistics] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, timeline: Timeline, *, since_s: float = 0.0) -> "Statistics":
        """What the lanes of a timeline did from a moment on."""
        statistics = cls(num_layers=timeline.num_layers, since_s=since_s, until_s=timeline.length_s)
        for lane in timeline.lanes:
            for span in timeline.on(lane):
                statistics.add(span)
        return statistics

    def add(self, span: Span) -> None:
        """Counts a span; those of one lane come in the order in which they ran."""
        lane = self.lanes.get(span.lane)
        if lane is None:
            lane = self.lanes[span.lane] = LaneStatistics(
                lane=span.lane,
                since_s=self.since_s,
                until_s=self.until_s,
                num_longest=self.num_longest,
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
        """The longest bubbles of some lanes, longest first; at most `num_longest` of each."""
        found = [bubble for lane in lanes for bubble in self.lanes[lane].longest]
        return sorted(found, key=lambda bubble: -bubble.seconds)[:count]


def in_order(lanes: Iterable[str]) -> list[str]:
    """Names of lanes as they are shown: processors, links up and down, disk; unknown ones last."""
    known = {lane: place for place, lane in enumerate(LANES)}
    return sorted(lanes, key=lambda lane: known.get(lane, len(known)))
