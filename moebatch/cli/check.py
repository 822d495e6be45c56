"""``moebatch check``."""

from typing import Annotated

import typer
from rich.console import Console

from moebatch.cli.options import Exact, JobFile
from moebatch.report.console import error_console

Checksums = Annotated[
    bool,
    typer.Option("--checksums", help="Read all weights, and compare checksums where known."),
]


def check(job: JobFile, checksums: Checksums = False, exact: Exact = False) -> None:
    """Check job file, input and checkpoint without running; list every fault with its line."""
    from moebatch.job.check import check_job
    from moebatch.report.findings import print_findings
    from moebatch.report.reading import counting_bytes

    with counting_bytes(error_console()) as told:
        findings = check_job(job, checksums=told if checksums else None, is_exact=exact)
    print_findings(findings, Console())
    raise typer.Exit(findings.exit_code)
