"""``moebatch plan``."""

from pathlib import Path
from typing import Annotated

import typer

from moebatch.cli.as_json import AsJson, print_json
from moebatch.cli.options import (
    PICTURES,
    GenLen,
    Hw,
    Model,
    PlannedJob,
    PromptLen,
    Requests,
    Schedule,
    WhatIf,
    either,
    named,
)
from moebatch.cli.question import asked_question
from moebatch.plan.options import ChosenMethod, PlanOptions
from moebatch.report.console import output_console, show

Method = Annotated[ChosenMethod, typer.Option("--method", help="How to choose the policy.")]
Paper = Annotated[bool, typer.Option("--paper", help="MoE-Lightning's own forms and constants.")]
Vendor = Annotated[
    bool, typer.Option("--vendor", help="Figures of data sheets instead of measured ones.")
]
Policy = Annotated[
    str | None, typer.Option("--policy", help="Predict this policy, a name or a file.")
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the policy to this file.")
]
Roofline = Annotated[
    Path | None,
    typer.Option(
        "--roofline",
        callback=named(*PICTURES),
        help=f"Draw the rooflines into this file: {either(PICTURES)}.",
    ),
]


def plan(
    job: PlannedJob = None,
    hw: Hw = None,
    model: Model = None,
    prompt_len: PromptLen = None,
    gen_len: GenLen = None,
    requests: Requests = None,
    what_if: WhatIf = None,
    method: Method = "milp",
    paper: Paper = False,
    vendor: Vendor = False,
    policy: Policy = None,
    schedule: Schedule = None,
    output: Output = None,
    roofline: Roofline = None,
    as_json: AsJson = False,
) -> None:
    """Predict policy, tokens per second, time and memory, what binds and what would help."""
    options = PlanOptions(
        has_job=job is not None,
        hw=hw,
        model=model,
        prompt_len=prompt_len,
        gen_len=gen_len,
        requests=requests,
        what_if=tuple(what_if or ()),
        method=method,
        paper=paper,
        vendor=vendor,
        policy=policy,
        schedule=schedule,
    )
    options.require_consistent()
    _answer(job, options, output=output, roofline=roofline, as_json=as_json)


def _answer(
    job: Path | None,
    options: PlanOptions,
    *,
    output: Path | None,
    roofline: Path | None,
    as_json: bool,
) -> None:
    from moebatch.plan.answers import answer_policy_file, answer_question
    from moebatch.plan.as_json import answer_json
    from moebatch.report.drawings import write_roofline
    from moebatch.report.plan import plan_view
    from moebatch.spec.text_file import write_text

    given = options.given_policy()
    answer = answer_question(asked_question(job, options), options, given)
    if roofline is not None:
        write_roofline(roofline, answer)
    if output is not None:
        write_text(output, answer_policy_file(answer).to_yaml())
    if as_json:
        print_json(answer_json(answer))
    else:
        show(output_console(), plan_view(answer))
