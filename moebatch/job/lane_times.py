"""What the lanes of a run have done, as reports show it."""

from collections.abc import Collection

from moebatch.engine.build import BuiltEngine
from moebatch.job.status import LaneTime
from moebatch.schedule.lanes import lane_of_row
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.statistics import (
    LAUNCH,
    PROCESSORS,
    LaneStatistics,
    Statistics,
    in_order,
)

DISK = "disk->dram"
_EXPERTS_COMING = (Kind.CHUNK, Kind.FETCH, Kind.STAGE, Kind.PAGE, Kind.BLOCK)


def lane_times(built: BuiltEngine, elapsed_s: float) -> tuple[LaneTime, ...]:
    """Busy seconds of every lane that has done something."""
    reads, between = built.reads, dict[str, float]()
    if built.recorder is None:
        busy = {"cpu": max(0.0, elapsed_s - reads.waited_s), DISK: reads.busy.total_s}
    else:
        lanes = built.recorder.statistics.lanes
        busy = {name: lanes[name].busy_s for name in list(lanes) if lane_of_row(name) != DISK}
        if _cpu_launches(busy):
            busy["cpu"] = max(0.0, elapsed_s - _waits_s(lanes["cpu"]))
            between["cpu"] = max(0.0, busy["cpu"] - lanes["cpu"].busy_s)
        if reads.num_bytes:
            busy[DISK] = reads.busy.total_s
    return tuple(
        LaneTime(
            name=name, busy_s=busy[name], elapsed_s=elapsed_s, between_s=between.get(name, 0.0)
        )
        for name in in_order(busy)
    )


def waited_s(built: BuiltEngine) -> float:
    """Seconds in which what computes experts waited for them."""
    if built.recorder is None:
        return built.reads.waited_s
    lane = _main_lane(built.recorder.statistics)
    return sum(lane.idle_s.get(kind, 0.0) for kind in _EXPERTS_COMING) if lane else 0.0


def shown_waits(statistics: Statistics) -> Statistics:
    """The same without reads of a disk, whose rows say little one by one, and without what
    `lane_times` takes for work."""
    shown = Statistics(
        num_layers=statistics.num_layers, since_s=statistics.since_s, until_s=statistics.until_s
    )
    for name, lane in list(statistics.lanes.items()):
        if lane_of_row(name) != DISK:
            works = name == "cpu" and _cpu_launches(statistics.lanes)
            shown.lanes[name] = lane.apart_from(LAUNCH) if works else lane
    return shown


def _cpu_launches(lanes: Collection[str]) -> bool:
    """Whether the CPU's lane is that of the thread that launches: what it does between tasks is
    work, too."""
    return "gpu" not in lanes and "cpu" in lanes


def _waits_s(lane: LaneStatistics) -> float:
    return sum(seconds for kind, seconds in list(lane.idle_s.items()) if kind != LAUNCH)


def _main_lane(statistics: Statistics) -> LaneStatistics | None:
    return next((statistics.lanes[name] for name in PROCESSORS if name in statistics.lanes), None)
