"""``moebatch plan``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebatch.cli.as_json import AsJson, answering, print_json
from moebatch.cli.parameters import (
    PICTURES,
    PlannedJob,
    either,
    named,
    require_places,
    with_options,
)
from moebatch.cli.process import let_threads_sleep
from moebatch.garbage import importing
from moebatch.plan.options import PlanOptions
from moebatch.report.console import error_console, logger, output_console, show

if TYPE_CHECKING:
    from moebatch.plan.question import Question

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


@with_options
def plan(
    options: PlanOptions,
    job: PlannedJob = None,
    output: Output = None,
    roofline: Roofline = None,
    as_json: AsJson = False,
) -> None:
    """Predict speed, time and memory of a job, and what would help. Says policy and what binds."""
    with answering(as_json):
        options = replace(options, has_job=job is not None)
        options.require_consistent()
        written = {"--output": output, "--roofline": roofline}
        require_places(options.command, written, files_read(job, options))
        with importing():
            from moebatch.plan.as_json import answer_json
            from moebatch.plan.methods import answer_policy_file, answer_question
            from moebatch.report.plan import plan_views
            from moebatch.spec.files.text_file import write_text

        given = options.given_policy()
        answer = answer_question(asked_question(job, options), options, given)
        if roofline is not None:
            from moebatch.report.pictures.drawings import write_roofline

            write_roofline(roofline, answer)
        if output is not None:
            write_text(output, answer_policy_file(answer).to_yaml())
    if as_json:
        print_json(answer_json(answer))
    else:
        for view in plan_views(answer):
            show(output_console(), view)


def files_read(job: Path | None, options: PlanOptions) -> dict[str, str | Path | None]:
    """What may be files that are planned by, as `require_places` takes it. A policy may be written
    back with its prediction."""
    return {"JOB": job, "--hw": options.hw, "--model": options.model}


def asked_question(job: Path | None, options: PlanOptions) -> "Question":
    """Of a job file: its model, a sample of its rows, this machine. Otherwise of a model by name or
    shape, of which nothing has to be here, and without torch, so that the answer comes at once."""
    if job is None:
        from moebatch.measure.saved import machine_profile
        from moebatch.plan.question import stated_question
        from moebatch.spec.machine.profile import load_profile

        profile, notes = machine_profile() if options.hw is None else (load_profile(options.hw), ())
        return stated_question(profile, options).noted(notes)
    let_threads_sleep()
    from moebatch.job.question import job_question
    from moebatch.spec.job import load_job

    return job_question(load_job(job), options, logger(error_console(), quiet=False))
