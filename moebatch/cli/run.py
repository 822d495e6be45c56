"""``moebatch run``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moebatch.cli.options import Gantt, JobFile, Quiet, Schedule
from moebatch.cli.threads import let_threads_sleep
from moebatch.errors import ExitCode, Interrupted
from moebatch.report.console import error_console, say, teller

if TYPE_CHECKING:
    from moebatch.job.options import RunOptions
    from moebatch.job.run import JobRun
    from moebatch.job.status import RunSummary

Policy = Annotated[
    str | None, typer.Option("--policy", help="Run this policy instead of planning one.")
]
Recalibrate = Annotated[
    bool, typer.Option("--recalibrate", help="Keep what the run shows of this machine's speed.")
]
Sync = Annotated[
    bool,
    typer.Option("--sync", help="Everything one after the other: the reference, on the CPU."),
]
Static = Annotated[
    bool,
    typer.Option("--static", help="No row begins before all of a batch have ended."),
]
NoShare = Annotated[
    bool, typer.Option("--no-share", help="Compute rows alone, however alike they begin.")
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write a Chrome trace (.json or .json.gz) of first passes."),
]
TracePasses = Annotated[
    int, typer.Option("--trace-passes", min=1, max=1000, help="How many of them.")
]


def run(
    job: JobFile,
    quiet: Quiet = False,
    policy: Policy = None,
    recalibrate: Recalibrate = False,
    schedule: Schedule = None,
    sync: Sync = False,
    static: Static = False,
    no_share: NoShare = False,
    trace: Trace = None,
    gantt: Gantt = None,
    trace_passes: TracePasses = 8,
) -> None:
    """Run a job: read its prompts, write its answers in the same order."""
    let_threads_sleep()
    from moebatch.job.options import RunOptions
    from moebatch.spec.policy_file import load_policy

    options = RunOptions(
        policy=None if policy is None else load_policy(policy),
        schedule=schedule,
        is_plain=sync,
        is_static=static,
        shares=not no_share,
        num_traced_passes=trace_passes,
        trace=trace,
        gantt=gantt,
    )
    options.require_consistent()
    summary = _execute(job, options, quiet=quiet, recalibrate=recalibrate)
    raise typer.Exit(ExitCode.ROWS_FAILED if summary.num_failed else ExitCode.OK)


def _execute(job: Path, options: "RunOptions", *, quiet: bool, recalibrate: bool) -> "RunSummary":
    from moebatch.job.run import JobRun
    from moebatch.report.drawings import write_drawings
    from moebatch.spec.job import load_job

    console = error_console()
    tell = teller(console, quiet=quiet)
    job_run = JobRun(load_job(job), tell, options)
    summary = _watched(job_run, console, quiet=quiet)
    _report(summary, console, quiet=quiet)
    if options.is_drawn:
        timelines = job_run.timelines()
        if timelines:
            write_drawings(timelines, trace=options.trace, gantt=options.gantt, tell=tell)
        else:
            tell("there is nothing to draw: no pass was computed")
    if recalibrate:
        job_run.recalibrate(summary)
    return summary


def _watched(job_run: "JobRun", console: Console, *, quiet: bool) -> "RunSummary":
    from moebatch.report.progress import watching
    from moebatch.report.summary import stopped_early

    try:
        with watching(job_run.status, console, quiet=quiet):
            return job_run.execute()
    except KeyboardInterrupt:
        raise Interrupted(stopped_early(job_run.status())) from None


def _report(summary: "RunSummary", console: Console, *, quiet: bool) -> None:
    from moebatch.report.summary import failed_rows, summary_table

    if not quiet:
        console.print(summary_table(summary))
    elif summary.num_failed:
        say(console, failed_rows(summary))
