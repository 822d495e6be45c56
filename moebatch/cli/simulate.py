"""``moebatch simulate``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebatch.cli.as_json import AsJson, print_json
from moebatch.cli.options import (
    TRACES,
    Gantt,
    GenLen,
    Hw,
    Model,
    PlannedJob,
    PromptLen,
    Requests,
    Schedule,
    WhatIf,
    named,
)
from moebatch.cli.question import asked_question
from moebatch.plan.options import PlanOptions
from moebatch.plan.work import Work
from moebatch.report.console import output_console, show

if TYPE_CHECKING:
    from moebatch.plan.answer import Answer
    from moebatch.plan.simulation import SimOptions, Simulation

Policy = Annotated[
    str | None, typer.Option("--policy", help="This policy, a name or a file; default: plan.")
]
Compare = Annotated[
    str | None, typer.Option("--compare", help="More schedules, such as multi,hot.")
]
AsWork = Annotated[Work, typer.Option("--work", help="What the passes compute.")]
Passes = Annotated[int, typer.Option("--passes", min=1, max=1000, help="Passes to simulate.")]
Skew = Annotated[
    float, typer.Option("--skew", min=0, max=10, help="Popularity of experts: rank**-SKEW.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63, help="Seed of the routing.")]
Routing = Annotated[
    Path | None, typer.Option("--routing", help="Trace of what gates chose, not a skew.")
]
NumHot = Annotated[
    int | None,
    typer.Option("--num-hot", min=0, max=65536, help="Experts loaded ahead of their gates."),
]
Slots = Annotated[
    int | None,
    typer.Option("--slots", min=2, max=65536, help="Slots of experts instead of the policy's."),
]
Durations = Annotated[
    Path | None, typer.Option("--durations", help="File of seconds by kinds of tasks.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", callback=named(*TRACES), help="Write a Chrome trace (.json or .json.gz)."
    ),
]


def simulate(
    job: PlannedJob = None,
    hw: Hw = None,
    model: Model = None,
    prompt_len: PromptLen = None,
    gen_len: GenLen = None,
    requests: Requests = None,
    what_if: WhatIf = None,
    policy: Policy = None,
    schedule: Schedule = None,
    compare: Compare = None,
    work: AsWork = "decode",
    passes: Passes = 3,
    skew: Skew = 0.0,
    seed: Seed = 0,
    routing: Routing = None,
    num_hot: NumHot = None,
    slots: Slots = None,
    durations: Durations = None,
    trace: Trace = None,
    gantt: Gantt = None,
    as_json: AsJson = False,
) -> None:
    """Show what every lane would do under one schedule or several, and what it would wait for."""
    from moebatch.plan.durations import load_durations
    from moebatch.plan.simulation import SimOptions, timelines_of
    from moebatch.report.drawings import write_timelines

    options = PlanOptions(
        has_job=job is not None,
        hw=hw,
        model=model,
        prompt_len=prompt_len,
        gen_len=gen_len,
        requests=requests,
        what_if=tuple(what_if or ()),
        policy=policy,
        command="moebatch simulate",
    )
    options.require_consistent()
    asked = SimOptions(
        schedule=schedule,
        compare=_names(compare or ""),
        num_passes=passes,
        work=work,
        skew=skew,
        seed=seed,
        num_hot=num_hot,
        num_slots=slots,
        table={} if durations is None else load_durations(durations),
    )
    asked.require_known()
    answer, simulated = _simulate(job, options, asked, routing)
    write_timelines(timelines_of(simulated), trace=trace, gantt=gantt, title=answer.title)
    _show(answer, simulated, as_json=as_json)


def _simulate(
    job: Path | None, options: PlanOptions, asked: "SimOptions", routing: Path | None
) -> "tuple[Answer, dict[str, Simulation]]":
    from moebatch.plan.answers import answer_question
    from moebatch.plan.simulation import simulations
    from moebatch.predict.trace import load_routing

    given, question = options.given_policy(), asked_question(job, options)
    if routing is not None:
        asked = replace(asked, routing=load_routing(routing, question.problem.shape))
    answer = answer_question(question, options, given)
    return answer, simulations(answer.problem, answer.policy, asked)


def _show(answer: "Answer", simulated: "dict[str, Simulation]", *, as_json: bool) -> None:
    from moebatch.plan.simulation import simulation_json
    from moebatch.report.timeline_view import simulated_view

    if as_json:
        print_json(simulation_json(answer, simulated))
    else:
        show(output_console(), simulated_view(answer, simulated))


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())
