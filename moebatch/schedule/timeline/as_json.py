"""A timeline as plain data with stable keys, for programs."""

from typing import Any

from moebatch.schedule.timeline.statistics import LaneStatistics, Statistics
from moebatch.schedule.timeline.timeline import Bubble, Timeline


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """Seconds of each pass, and what each lane did once the pipeline had filled. Units stand in
    the names; shares are 0..1."""
    statistics = Statistics.of(timeline, since_s=timeline.steady_since_s)
    return {
        "num_layers": timeline.num_layers,
        "num_passes": len(timeline.pass_ends_s),
        "length_s": timeline.length_s,
        "pass_s": list(timeline.pass_s),
        "steady_pass_s": timeline.steady_pass_s,
        "steady_since_s": timeline.steady_since_s,
        "num_steady_passes": timeline.num_steady_passes,
        **statistics_json(statistics),
    }


def statistics_json(statistics: Statistics) -> dict[str, Any]:
    """What each lane did, and what it waited for."""
    return {
        "bottleneck": statistics.bottleneck,
        "lanes": {
            name: {
                **_lane(statistics.lanes[name]),
                "share": statistics.share(name),
                "rest_s": statistics.rest_s(name),
            }
            for name in statistics.names
        },
    }


def _lane(lane: LaneStatistics) -> dict[str, Any]:
    return {
        "num_tasks": lane.num_tasks,
        "busy_s": lane.busy_s,
        "bubbles": {
            "total_s": lane.bubbles_s,
            "waited_for_s": dict(sorted(lane.idle_s.items(), key=lambda pair: -pair[1])),
            "longest": [_bubble(bubble) for bubble in lane.longest],
        },
    }


def _bubble(bubble: Bubble) -> dict[str, Any]:
    return {
        "start_s": bubble.start_s,
        "seconds": bubble.seconds,
        "before": str(bubble.before),
        "waited_for": bubble.waited_for,
    }
