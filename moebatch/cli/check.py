"""``moebatch check``."""

import typer
from rich.console import Console

from moebatch.cli.options import JobFile


def check(job: JobFile) -> None:
    """Check job file, input and checkpoint without running; list every fault with its line."""
    from moebatch.job.check import check_job
    from moebatch.report.findings import print_findings

    findings = check_job(job)
    print_findings(findings, Console())
    raise typer.Exit(findings.exit_code)
