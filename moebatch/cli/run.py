"""``moebatch run``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moebatch.cli.as_json import AsJson, answering, error_json, print_json
from moebatch.cli.options import TRACES, Exact, Gantt, JobFile, Limit, Quiet, Schedule, named
from moebatch.cli.signals import stopping_on_signals
from moebatch.cli.threads import let_threads_sleep
from moebatch.errors import ExitCode, LockHeld, Stopped
from moebatch.report.console import error_console, logger, print_error, say, show

if TYPE_CHECKING:
    from moebatch.job.options import RunOptions
    from moebatch.job.run import JobRun
    from moebatch.job.status import RunSummary
    from moebatch.job.stop import Stop

Policy = Annotated[
    str | None, typer.Option("--policy", help="Run this policy instead of planning one.")
]
Recalibrate = Annotated[
    bool, typer.Option("--recalibrate", help="Keep what the run shows of this machine's speed.")
]
Sync = Annotated[
    bool,
    typer.Option("--sync", help="One task after the other, on the CPU: the reference."),
]
Static = Annotated[
    bool,
    typer.Option("--static", help="Admit rows only when all of a batch have ended."),
]
NoShare = Annotated[
    bool,
    typer.Option("--no-share", help="Compute every row by itself, even if prompts begin alike."),
]
ShardOf = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="Only every n-th row: 3/8, or 3 if earlier runs gave 8; then `moebatch merge`.",
    ),
]
SkipIfLocked = Annotated[
    bool,
    typer.Option("--skip-if-locked", help="Exit at once if another run holds the job; for cron."),
]
Requeue = Annotated[
    bool,
    typer.Option("--requeue", help="In Slurm: when out of time, queue the job again."),
]
MaxRuntime = Annotated[
    str | None,
    typer.Option(
        "--max-runtime", help="Stop after this time and keep what is done, such as 3h30m."
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        callback=named(*TRACES),
        help="Write a Chrome trace (.json or .json.gz) of the first passes.",
    ),
]
Details = Annotated[
    bool, typer.Option("--details", help="Report lanes, memory, and predicted beside measured.")
]
TracePasses = Annotated[
    int, typer.Option("--trace-passes", min=1, max=1000, help="Passes to trace.")
]

_MOST_FRUITLESS = 3
"""Runs in a row that completed nothing: one may have been cut short, since Slurm's signal can come
a minute early; a job that needs more time than it gets would otherwise be queued without end."""


def run(
    job: JobFile,
    quiet: Quiet = False,
    policy: Policy = None,
    recalibrate: Recalibrate = False,
    schedule: Schedule = None,
    sync: Sync = False,
    static: Static = False,
    no_share: NoShare = False,
    exact: Exact = False,
    shard: ShardOf = None,
    limit: Limit = None,
    max_runtime: MaxRuntime = None,
    skip_if_locked: SkipIfLocked = False,
    requeue: Requeue = False,
    trace: Trace = None,
    gantt: Gantt = None,
    trace_passes: TracePasses = 8,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """Run a job: read its prompts, write its answers in the same order."""
    let_threads_sleep()
    report = _Reporting(quiet=quiet, details=details, as_json=as_json)
    with answering(as_json):
        from moebatch.folder.shard import parse_shard
        from moebatch.job.options import RunOptions
        from moebatch.job.runtime import allowed_s
        from moebatch.job.stop import Stop
        from moebatch.schedule.registry import schedule_faults
        from moebatch.spec.policy_file import load_policy

        options = RunOptions(
            policy=None if policy is None else load_policy(policy, rules=schedule_faults),
            schedule=schedule,
            is_plain=sync,
            is_static=static,
            shares=not no_share,
            is_exact=exact,
            shard=None if shard is None else parse_shard(shard),
            limit=limit,
            num_traced_passes=trace_passes,
            trace=trace,
            gantt=gantt,
        )
        options.require_consistent()
        stop = Stop(max_runtime_s=allowed_s(max_runtime))
        try:
            summary = _execute(job, options, stop, report, recalibrate=recalibrate)
        except LockHeld as held:
            if not skip_if_locked:
                raise
            report.skipped(held)
            raise typer.Exit(ExitCode.OK) from None
        except Stopped as stopped:
            if not (requeue and stop.is_out_of_time):
                raise
            print_error(str(stopped))  # first: what is queued again is killed at once
            report.ended(stopped)
            _queue_again(stopped)
            raise typer.Exit(stopped.exit_code) from None
    raise typer.Exit(ExitCode.ROWS_FAILED if summary.num_failed else ExitCode.OK)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reporting:
    """How much is said of a run, and where."""

    quiet: bool
    details: bool
    as_json: bool

    def skipped(self, held: LockHeld) -> None:
        logger(error_console(), quiet=self.quiet)(f"skipped: {held}")
        if self.as_json:
            print_json({"exit_code": int(ExitCode.OK), "skipped": str(held)})

    def ended(self, stopped: Stopped) -> None:
        if self.as_json:
            print_json(error_json(stopped))

    def done(self, summary: "RunSummary", job: Path) -> None:
        from moebatch.report.summary import failed_rows, summary_view

        if self.as_json:
            code = ExitCode.ROWS_FAILED if summary.num_failed else ExitCode.OK
            print_json({"exit_code": int(code), **summary.as_json()})
        elif not self.quiet:
            show(error_console(), summary_view(summary, job, details=self.details))
        if self.quiet and summary.num_failed:
            say(error_console(), failed_rows(summary))


def _queue_again(stopped: Stopped) -> None:
    from moebatch.job.slurm import requeue, slurm_job_id

    job = slurm_job_id()
    if stopped.num_fruitless >= _MOST_FRUITLESS:
        refusal: str | None = (
            f"{stopped.num_fruitless} runs in a row completed nothing; it needs more time"
        )
    else:
        refusal = requeue(job) if job is not None else "this is no Slurm job"
    if refusal is not None:
        say(error_console(), f"could not be queued again: {refusal}")


def _execute(
    job: Path, options: "RunOptions", stop: "Stop", report: _Reporting, *, recalibrate: bool
) -> "RunSummary":
    console = error_console()
    log = logger(console, quiet=report.quiet)
    with stopping_on_signals(stop), stop.heard():
        # Not before: that takes seconds, in which a signal would just end the process.
        from moebatch.spec.job import load_job

        loaded = load_job(job)  # what is wrong with it is said before the longer imports
        from moebatch.job.run import JobRun
        from moebatch.report.drawings import write_timelines

        job_run = JobRun(loaded, log, options, stop)
        summary = _watched(job_run, console, quiet=report.quiet)
    report.done(summary, job)
    if options.is_drawn:
        timelines = job_run.timelines()
        if timelines:
            write_timelines(timelines, trace=options.trace, gantt=options.gantt, log=log)
        else:
            log("there is nothing to draw: no pass was computed")
    if recalibrate:
        job_run.recalibrate(summary)
    return summary


def _watched(job_run: "JobRun", console: Console, *, quiet: bool) -> "RunSummary":
    from moebatch.report.progress import watching

    with watching(job_run.status, console, quiet=quiet):
        return job_run.execute()
