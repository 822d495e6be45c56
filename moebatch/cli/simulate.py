"""``moebatch simulate``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebatch.cli.as_json import AsJson, answering, print_json
from moebatch.cli.parameters import Drawings, PlannedJob, require_places, with_options
from moebatch.cli.plan import asked_question, files_read
from moebatch.plan.options import PlanOptions, SimOptions
from moebatch.report.console import error_console, output_console, show

if TYPE_CHECKING:
    from moebatch.plan.answer import Answer
    from moebatch.plan.simulation.simulation import Simulation

Routing = Annotated[
    Path | None, typer.Option("--routing", help="Trace of what gates chose, not a skew.")
]
Durations = Annotated[
    Path | None, typer.Option("--durations", help="File of seconds by kinds of tasks.")
]


@with_options
def simulate(
    options: PlanOptions,
    simulated: SimOptions,
    drawings: Drawings,
    job: PlannedJob = None,
    routing: Routing = None,
    durations: Durations = None,
    as_json: AsJson = False,
) -> None:
    """Show what every lane would do under a schedule, and wait for."""
    with answering(as_json):
        options = replace(options, has_job=job is not None, command="moebatch simulate")
        options.require_consistent()
        simulated.require_consistent()
        read = {**files_read(job, options), "--routing": routing, "--durations": durations}
        require_places(options.command, drawings.paths, read)
        from moebatch.plan.simulation.simulation import simulation_json
        from moebatch.report.pictures.drawings import write_timelines
        from moebatch.report.timeline_view import simulated_view

        answer, found = _simulations(job, options, simulated, routing, durations)
        timelines, title = {name: one.timeline for name, one in found.items()}, answer.title
        write_timelines(timelines, trace=drawings.trace, gantt=drawings.gantt, title=title)
    if as_json:
        print_json(simulation_json(answer, found))
    else:
        show(output_console(), simulated_view(answer, found))


def _simulations(
    job: Path | None,
    options: PlanOptions,
    simulated: SimOptions,
    routing: Path | None,
    durations: Path | None,
) -> "tuple[Answer, dict[str, Simulation]]":
    """The answer by the policy's own schedule, and what the lanes do under those asked for."""
    from moebatch.plan.methods import answer_question
    from moebatch.plan.simulation.simulation import load_durations, simulations
    from moebatch.predict.trace import load_routing
    from moebatch.report.progress import progress_bar

    given, question = options.given_policy(), asked_question(job, options)
    simulated = replace(
        simulated,
        schedule=options.schedule,
        table={} if durations is None else load_durations(durations),
        routing=None if routing is None else load_routing(routing, question.problem.shape),
    )
    answer = answer_question(question, replace(options, schedule=None), given)
    with progress_bar("simulating", error_console(), quiet=False) as advance:
        return answer, simulations(answer.problem, answer.policy, simulated, advance)
