"""``moebatch status``."""

from rich.console import Console

from moebatch.cli.options import JobFile


def status(job: JobFile) -> None:
    """Show how far a job is, over all of its shards, without disturbing it."""
    from moebatch.job.overview import overview
    from moebatch.report.overview import overview_table
    from moebatch.spec.job import load_job

    Console().print(overview_table(overview(load_job(job))))
