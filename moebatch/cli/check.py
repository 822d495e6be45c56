"""``moebatch check``."""

from typing import Annotated

import typer

from moebatch.cli.as_json import AsJson, print_json
from moebatch.cli.options import Exact, JobFile, Limit
from moebatch.report.console import error_console, output_console

Checksums = Annotated[
    bool,
    typer.Option("--checksums", help="Read all weights, and compare checksums where known."),
]


def check(
    job: JobFile,
    checksums: Checksums = False,
    exact: Exact = False,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Check job file, input and checkpoint without running; list every fault with its line."""
    from moebatch.job.check import check_job
    from moebatch.report.check import counting_bytes, print_findings

    with counting_bytes(error_console()) as count_bytes:
        counter = count_bytes if checksums else None
        findings = check_job(job, checksums=counter, is_exact=exact, limit=limit)
    if as_json:
        print_json(findings.as_json())
    else:
        print_findings(findings, output_console())
    raise typer.Exit(findings.exit_code)
