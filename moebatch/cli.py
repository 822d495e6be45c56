"""The commands: parse, call, render, exit code. What they do is done below."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import moebatch
from moebatch.errors import ExitCode, Interrupted, MoebatchError

_LOG_WIDTH = 160

app = typer.Typer(
    name="moebatch",
    help="Answers a file of prompts with a Mixture-of-Experts model larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing unless something is wrong.")]


@app.command()
def run(job: JobFile, quiet: Quiet = False) -> None:
    """Run a job: read its prompts, write its answers in the same order."""
    _let_threads_sleep()
    from moebatch.job.run import JobRun
    from moebatch.report.progress import watching
    from moebatch.report.summary import failed_rows, stopped_early, summary_table
    from moebatch.spec.job import load_job

    console = _error_console()

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    job_run = JobRun(load_job(job), tell)
    try:
        with watching(job_run.status, console, quiet=quiet):
            summary = job_run.execute()
    except KeyboardInterrupt:
        raise Interrupted(stopped_early(job_run.status())) from None
    if not quiet:
        console.print(summary_table(summary))
    elif summary.num_failed:
        console.print(failed_rows(summary), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(ExitCode.ROWS_FAILED if summary.num_failed else ExitCode.OK)


@app.command()
def check(job: JobFile) -> None:
    """Check job file, input and checkpoint without running; list every fault with its line."""
    from moebatch.job.check import check_job
    from moebatch.report.findings import print_findings

    findings = check_job(job)
    print_findings(findings, Console())
    raise typer.Exit(findings.exit_code)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"moebatch {moebatch.__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: a user's mistake is a message and an exit code, never a traceback."""
    try:
        app(standalone_mode=True)
    except MoebatchError as error:
        _complain(str(error))
        sys.exit(error.exit_code)


def _error_console() -> Console:
    """Standard error; in a log file lines are longer than rich would guess."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_LOG_WIDTH)


def _let_threads_sleep() -> None:
    """Before torch is loaded: its threads should sleep, not spin, while they have nothing to do.

    Spinning ones keep readers, the progress display and other people's processes off the cores,
    which then makes every parallel operation wait for a thread that is not running.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _complain(message: str) -> None:
    console = _error_console()
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, highlight=False, soft_wrap=True)
