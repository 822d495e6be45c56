"""``moebatch run``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebatch.cli.as_json import AsJson, answering, error_json, print_json
from moebatch.cli.parameters import Drawings, JobFile, Quiet, require_places, with_options
from moebatch.cli.process import let_threads_sleep, stopping_on_signals
from moebatch.errors import ExitCode, LockHeld, MoebatchError, Stopped
from moebatch.job.options import RunOptions
from moebatch.report.console import error_console, logger, print_error, say, show
from moebatch.spec.option import Option

if TYPE_CHECKING:
    from moebatch.job.run import JobRun
    from moebatch.job.status import RunSummary
    from moebatch.job.stop import Stop

Policy = Annotated[
    str | None, typer.Option("--policy", help="Run this policy instead of planning one.")
]
ShardOf = Annotated[
    str | None,
    typer.Option(
        "--shard",
        help="Only every n-th row: 3/8, or 3 if earlier runs gave 8; then `moebatch merge`.",
    ),
]

_MOST_FRUITLESS = 3
"""Runs in a row that completed nothing: one may have been cut short, since Slurm's signal can come
a minute early; a job that needs more time than it gets would otherwise be queued without end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """When a run ends, what comes after it, and how much is said of it."""

    max_runtime: Annotated[
        str | None, Option("Stop after this time and keep what is done, such as 3h30m.")
    ] = None
    skip_if_locked: Annotated[
        bool, Option("Exit at once if another run holds the job; for cron.")
    ] = False
    requeue: Annotated[bool, Option("In Slurm: when out of time, queue the job again.")] = False
    recalibrate: Annotated[bool, Option("Keep what the run shows of this machine's speed.")] = False
    details: Annotated[bool, Option("Report lanes, memory, and predicted beside measured.")] = False
    quiet: Quiet = False
    as_json: AsJson = False

    def skipped(self, held: LockHeld) -> None:
        """Another run has the job."""
        logger(error_console(), quiet=self.quiet)(f"skipped: {held}")
        if self.as_json:
            print_json({"exit_code": int(ExitCode.OK), "skipped": str(held)})

    def queued_again(self, stopped: Stopped) -> None:
        """Out of time. What is said comes first: Slurm kills at once what it queues again."""
        print_error(str(stopped))
        if self.as_json:
            print_json(error_json(stopped))
        refusal = _queue_again(stopped)
        if refusal is not None:
            say(error_console(), f"could not be queued again: {refusal}")

    def done(self, summary: "RunSummary", job: Path) -> None:
        from moebatch.report.summary import failed_rows, summary_view

        if self.as_json:
            print_json(summary.as_json())
        elif not self.quiet:
            show(error_console(), summary_view(summary, job, details=self.details))
        if self.quiet and summary.num_failed:
            say(error_console(), failed_rows(summary))


@with_options
def run(
    job: JobFile,
    options: RunOptions,
    ending: Ending,
    drawings: Drawings,
    policy: Policy = None,
    shard: ShardOf = None,
) -> None:
    """Run a job, or continue it. Answers come in the order of the prompts."""
    let_threads_sleep()
    with answering(ending.as_json):
        from moebatch.folder.shard import parse_shard
        from moebatch.job.slurm import allowed_s
        from moebatch.job.stop import Stop
        from moebatch.schedule.registry import schedule_faults
        from moebatch.spec.policy.file import load_policy

        options = replace(
            options,
            policy=None if policy is None else load_policy(policy, rules=schedule_faults),
            shard=None if shard is None else parse_shard(shard),
            is_drawn=bool(drawings.paths),
        )
        options.require_consistent()
        require_places("moebatch run", drawings.paths, {"JOB": job, "--policy": policy})
        stop = Stop(max_runtime_s=allowed_s(ending.max_runtime))
        try:
            summary = _execute(job, options, stop, ending, drawings)
        except LockHeld as held:
            if not ending.skip_if_locked:
                raise
            ending.skipped(held)
            raise typer.Exit(ExitCode.OK) from None
        except Stopped as stopped:
            if not (ending.requeue and stop.is_out_of_time):
                raise
            ending.queued_again(stopped)
            raise typer.Exit(stopped.exit_code) from None
    raise typer.Exit(summary.exit_code)


def _queue_again(stopped: Stopped) -> str | None:
    """Why Slurm does not queue the job again; None if it does."""
    from moebatch.job.slurm import requeue, slurm_job_id

    if stopped.num_fruitless >= _MOST_FRUITLESS:
        return f"{stopped.num_fruitless} runs in a row completed nothing; it needs more time"
    job = slurm_job_id()
    return requeue(job) if job is not None else "this is no Slurm job"


def _execute(
    job: Path, options: RunOptions, stop: "Stop", ending: Ending, drawings: Drawings
) -> "RunSummary":
    console = error_console()
    log = logger(console, quiet=ending.quiet)
    with stopping_on_signals(stop):
        with stop.heard():
            # Not before: that takes seconds, in which a signal would just end the process.
            from moebatch.spec.job import load_job

            loaded = load_job(job)  # what is wrong with it is said before the longer imports
            with stop.held_back():  # C++ that calls Python ends the process for what that raises
                import_module("torch")
            from moebatch.job.run import JobRun, require_own_profile
            from moebatch.report.progress import watching

            stop.obey()
            if ending.recalibrate:
                require_own_profile(loaded)
            job_run = JobRun(loaded, log, options, stop)
            try:
                with watching(job_run.status, console, quiet=ending.quiet):
                    summary = job_run.execute()
            except Stopped:
                _draw(job_run, drawings, log)
                raise
            stop.over()
        ending.done(summary, job)
        _draw(job_run, drawings, log)
        with _only_warned():
            if ending.recalibrate:
                job_run.recalibrate(summary)
    return summary


def _draw(job_run: "JobRun", drawings: Drawings, log: Callable[[str], None]) -> None:
    """What was asked for, also of a run that had to stop: its first passes are there."""
    if not drawings.paths:
        return
    from moebatch.report.pictures.drawings import write_timelines

    with _only_warned():
        timelines = job_run.timelines()
        if timelines:
            write_timelines(timelines, trace=drawings.trace, gantt=drawings.gantt, log=log)
        else:
            log("there is nothing to draw: no pass was computed")


@contextmanager
def _only_warned() -> Iterator[None]:
    """While the block runs, what goes wrong is only told: rows have ended and are written."""
    try:
        yield
    except MoebatchError as error:
        say(error_console(), f"warning: {error}")
