"""Timelines as tables: how long a pass takes, what each lane did, and what it waited for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from moebatch.plan.answer import Answer
from moebatch.plan.options import Work
from moebatch.plan.simulation.simulation import Simulation, timelines_of
from moebatch.report.console import plain
from moebatch.report.tables import (
    NAME_WIDTH,
    NamedRows,
    Paragraph,
    ShareBar,
    named_bars,
    notes_view,
    titled_columns,
)
from moebatch.report.task_names import bubble_text, seconds_text, wait_text
from moebatch.schedule.timeline.statistics import LaneStatistics, Statistics
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.units import format_number

_NUM_WAITS = 5
_PASSES: Mapping[Work, str] = {
    "decode": "passes of a full batch that only decodes; --work mean has the job's prompts in them",
    "prefill": "a pass over the prompts of a full batch, then passes that only decode",
    "mean": "mean passes of the job, prompts among answers",
}
_NUM_REASONS = 2
_LEAST_SHARE = 0.005
"""Of the time of a run; lanes that waited less for something are not said to have waited."""


def simulated_view(answer: Answer, simulated: Mapping[str, Simulation]) -> RenderableType:
    """Model, machine and policy, what the lanes did under each schedule, and notes."""
    hardware = answer.problem.hardware
    title = f"[bold]{plain(answer.model)}[/] on [bold]{plain(hardware.name)}[/]"
    view = simulation_view(
        timelines_of(simulated),
        {name: one.tokens_per_pass for name, one in simulated.items()},
    )
    first = next(iter(simulated.values()))
    notes = [note for one in simulated.values() for note in one.notes]
    return Group(
        Text.from_markup(f"{title}: {plain(hardware.title)}"),
        Paragraph(str(first.policy), "dim"),
        Paragraph(_PASSES[first.work], "dim"),
        "",
        view,
        *([""] if notes or answer.notes else []),
        *notes_view((*notes, *answer.notes)),
    )


def simulation_view(
    timelines: Mapping[str, Timeline], tokens_per_pass: Mapping[str, float] | None = None
) -> RenderableType:
    """What `moebatch simulate` shows: a table for each schedule, and how they compare.

    Args:
        timelines: by name of the schedule, the one asked for first.
        tokens_per_pass: tokens generated in a pass, for schedules of which that is known.
    """
    rows = [
        _Simulated(name=name, timeline=timeline, num_tokens=(tokens_per_pass or {}).get(name))
        for name, timeline in timelines.items()
    ]
    parts: list[RenderableType] = []
    for row in rows:
        parts += [_schedule(row), ""]
    return Group(*parts, _comparison(rows)) if len(rows) > 1 else Group(*parts[:-1])


def waits_table(statistics: Statistics, count: int = _NUM_WAITS) -> NamedRows:
    """What the lanes of a run waited for, and the longest waits of those that matter most.

    Of each lane the main reasons, as far as they cost it some of the time.
    """
    grid, least_s = NamedRows(min_width=NAME_WIDTH), _LEAST_SHARE * statistics.length_s
    for name in statistics.names:
        for number, words in enumerate(_reasons(statistics.lanes[name], least_s)):
            grid.add_row("" if number else escape(name), words)
    longest = statistics.longest_waits(statistics.main_lanes, count)
    for number, bubble in enumerate(longest):
        words = bubble_text(bubble, statistics.num_layers)
        wait = f"{bubble.lane} {seconds_text(bubble.seconds)} {words}"
        grid.add_row("" if number else "longest waits", escape(wait))
    return grid


@dataclass(frozen=True, kw_only=True, slots=True)
class _Simulated:
    name: str
    timeline: Timeline
    num_tokens: float | None = None

    @property
    def statistics(self) -> Statistics:
        """What the lanes did once the pipeline had filled."""
        return Statistics.of(self.timeline, since_s=self.timeline.steady_since_s)


def _schedule(row: _Simulated) -> RenderableType:
    statistics, lanes = row.statistics, named_bars()
    waits = NamedRows(min_width=NAME_WIDTH)
    lanes.add_row("per pass", _speed(row), "")
    for name in statistics.names:
        lane, binds = statistics.lanes[name], name == statistics.bottleneck
        title = f"[bold yellow]{escape(name)}[/]" if binds else escape(name)
        idle_s = (lane.bubbles_s + statistics.rest_s(name)) / row.timeline.num_steady_passes
        lanes.add_row(title, ShareBar(statistics.share(name)), f"idle {seconds_text(idle_s)}")
        for bubble in lane.longest[:1]:
            words = bubble_text(bubble, statistics.num_layers)
            waits.add_row(title, escape(f"{seconds_text(bubble.seconds)} {words}"))
    parts: list[RenderableType] = [Text(row.name, style="bold"), lanes]
    if waits.row_count:
        parts += [Text("longest bubbles", style="dim"), waits]
    return Group(*parts)


def _speed(row: _Simulated) -> str:
    pass_s = row.timeline.steady_pass_s
    if not row.num_tokens or not pass_s:
        return f"[bold]{seconds_text(pass_s)}[/]"
    rate = f"[bold green]{format_number(row.num_tokens / pass_s)}[/] tok/s"
    return f"[bold]{seconds_text(pass_s)}[/], {rate}"


def _comparison(rows: list[_Simulated]) -> RenderableType:
    titles = "schedule", "per pass", "ratio", "busiest lane", "which waits for"
    table = titled_columns(*titles, left=(titles[0], *titles[3:]), bold=titles[:1])
    first_s = rows[0].timeline.steady_pass_s
    for row in rows:
        pass_s, statistics = row.timeline.steady_pass_s, row.statistics
        lane = statistics.bottleneck
        table.add_row(
            escape(row.name),
            seconds_text(pass_s),
            f"{pass_s / first_s:.2f}" if first_s else "",
            f"{escape(lane)} {statistics.share(lane):.0%}" if lane else "",
            _main_reason(row, statistics.lanes[lane]) if lane else "",
        )
    return table


def _main_reason(row: _Simulated, lane: LaneStatistics) -> str:
    kind = lane.main_reason
    if kind is None:
        return "[dim]nothing[/]"
    seconds = lane.idle_s[kind] / row.timeline.num_steady_passes
    return f"{escape(wait_text(kind))}, {seconds_text(seconds)}"


def _reasons(lane: LaneStatistics, least_s: float) -> Iterator[str]:
    """``waited 1.20 s for experts on their way``, longest first."""
    longest = sorted(lane.idle_s.items(), key=lambda pair: -pair[1])[:_NUM_REASONS]
    for kind, seconds in longest:
        if seconds < least_s:
            return
        yield f"waited {seconds_text(seconds)} for {escape(wait_text(kind))}"
