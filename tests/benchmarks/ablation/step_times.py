"""How long passes of a step took, and how busy the lanes were meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from moebatch.schedule.timeline.statistics import Statistics
from moebatch.schedule.timeline.timeline import Timeline
from tests.benchmarks.ablation.pass_trace import PassTrace, pass_traces
from tests.benchmarks.predictors.rows import Pass

Choose = Callable[[Pass], bool]
"""Whether a pass counts."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A step, measured."""

    rounds_s: tuple[float, ...]
    """Mean seconds of a pass in each round: some passes miss several experts, others none, and the
    rows need all of them."""
    num_passes: int
    """Of all rounds."""
    shares: dict[str, float]
    """Of the time of all rows in which each lane was busy, 0..1."""
    trace: PassTrace
    """Where the time of a pass goes."""

    @classmethod
    def of(
        cls, rounds: Sequence[Sequence[Pass]], timelines: Sequence[Timeline], choose: Choose
    ) -> "StepTimes":
        """From the passes of each round, and the timelines of the same passes."""
        chosen = [[one.seconds for one in passes if choose(one)] for passes in rounds]
        traces = [trace for timeline in timelines for trace in pass_traces(timeline)]
        counted = zip((one for passes in rounds for one in passes), traces, strict=True)
        statistics = [Statistics.of(timeline) for timeline in timelines]
        length_s = sum(one.length_s for one in statistics)
        lanes = dict.fromkeys(lane for one in statistics for lane in one.names)
        return cls(
            rounds_s=tuple(map(mean, chosen)),
            num_passes=sum(map(len, chosen)),
            trace=PassTrace.mean([trace for one, trace in counted if choose(one)]),
            shares={
                lane: sum(one.lanes[lane].busy_s for one in statistics if lane in one.lanes)
                / length_s
                for lane in lanes
            },
        )

    @property
    def pass_s(self) -> float:
        """The median of the rounds."""
        return median(self.rounds_s)

    def faster_than(self, other: "StepTimes") -> tuple[float, float, float]:
        """How many times as fast, by rounds that were neighbours in time: least, median, most."""
        pairs = zip(other.rounds_s, self.rounds_s, strict=True)
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        return ratios[0], median(ratios), ratios[-1]
