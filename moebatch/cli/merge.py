"""``moebatch merge``."""

import typer

from moebatch.cli.options import JobFile, Quiet
from moebatch.errors import ExitCode
from moebatch.report.console import error_console, logger
from moebatch.units import count_of


def merge(job: JobFile, quiet: Quiet = False) -> None:
    """Write the output of a job whose shards have all been run."""
    from moebatch.job.merge import merge as merged_rows
    from moebatch.spec.job import load_job

    log = logger(error_console(), quiet=quiet)
    merged = merged_rows(load_job(job))
    failed = f", {merged.num_failed} of them failed" if merged.num_failed else ""
    log(f"{count_of(merged.num_rows, 'row')}{failed}: {merged.output}")
    raise typer.Exit(ExitCode.ROWS_FAILED if merged.num_failed else ExitCode.OK)
