"""Simulated schedules as a person reads them."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from moebatch.plan.answer import Answer
from moebatch.plan.simulation import Simulation, timelines_of
from moebatch.report.console import plain
from moebatch.report.tables import Words, notes_view
from moebatch.report.timeline_view import simulation_view


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
        Words(str(first.policy), "dim"),
        "",
        view,
        *([""] if notes or answer.notes else []),
        *notes_view((*notes, *answer.notes)),
    )
