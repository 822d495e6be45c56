"""Timelines as tables: how long a pass takes, what each lane did, and what it waited for."""

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from moebatch.plan.answer import Answer
from moebatch.plan.options import Work
from moebatch.plan.simulation.simulation import Simulation
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
    first = next(iter(simulated.values()))
    notes = [note for one in simulated.values() for note in one.notes]
    return Group(
        Text.from_markup(f"{title}: {plain(hardware.title)}"),
        Paragraph(str(first.policy)),
        Paragraph(_PASSES[first.work]),
        "",
        simulation_view(simulated),
        *([""] if notes or answer.notes else []),
        *notes_view((*notes, *answer.notes)),
    )


def simulation_view(simulated: Mapping[str, Simulation]) -> RenderableType:
    """A table for each schedule, the one asked for first, and how they compare."""
    parts: list[RenderableType] = []
    for name, one in simulated.items():
        parts += [_schedule(name, one), ""]
    return Group(*parts, _comparison(simulated)) if len(simulated) > 1 else Group(*parts[:-1])


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


def _schedule(schedule: str, one: Simulation) -> RenderableType:
    statistics, lanes = one.statistics, named_bars()
    waits = NamedRows(min_width=NAME_WIDTH)
    lanes.add_row("per pass", _speed(one), "")
    for name in statistics.names:
        lane, binds = statistics.lanes[name], name == statistics.bottleneck
        title = f"[bold yellow]{escape(name)}[/]" if binds else escape(name)
        idle_s = (lane.bubbles_s + statistics.rest_s(name)) / one.timeline.num_steady_passes
        lanes.add_row(title, ShareBar(statistics.share(name)), f"idle {seconds_text(idle_s)}")
        for bubble in lane.longest[:1]:
            words = bubble_text(bubble, statistics.num_layers)
            waits.add_row(title, escape(f"{seconds_text(bubble.seconds)} {words}"))
    parts: list[RenderableType] = [Text(schedule, style="bold"), lanes]
    if waits.row_count:
        parts += [Text("longest bubbles", style="dim"), waits]
    return Group(*parts)


def _speed(one: Simulation) -> str:
    pass_s = f"[bold]{seconds_text(one.timeline.steady_pass_s)}[/]"
    if not one.tokens_per_s:
        return pass_s
    return f"{pass_s}, [bold green]{format_number(one.tokens_per_s)}[/] tok/s"


def _comparison(simulated: Mapping[str, Simulation]) -> RenderableType:
    titles = "schedule", "per pass", "ratio", "busiest lane", "which waits for"
    table = titled_columns(*titles, left=(titles[0], *titles[3:]), bold=titles[:1])
    first_s = next(iter(simulated.values())).timeline.steady_pass_s
    for name, one in simulated.items():
        pass_s, statistics = one.timeline.steady_pass_s, one.statistics
        lane = statistics.bottleneck
        table.add_row(
            escape(name),
            seconds_text(pass_s),
            f"{pass_s / first_s:.2f}" if first_s else "",
            f"{escape(lane)} {statistics.share(lane):.0%}" if lane else "",
            _main_reason(one, statistics.lanes[lane]) if lane else "",
        )
    return table


def _main_reason(one: Simulation, lane: LaneStatistics) -> str:
    kind = lane.main_reason
    if kind is None:
        return "[dim]nothing[/]"
    seconds = lane.idle_s[kind] / one.timeline.num_steady_passes
    return f"{escape(wait_text(kind))}, {seconds_text(seconds)}"


def _reasons(lane: LaneStatistics, least_s: float) -> Iterator[str]:
    """``waited 1.20 s for experts on their way``, longest first."""
    longest = sorted(lane.idle_s.items(), key=lambda pair: -pair[1])[:_NUM_REASONS]
    for kind, seconds in longest:
        if seconds < least_s:
            return
        yield f"waited {seconds_text(seconds)} for {escape(wait_text(kind))}"
