"""``moebatch status``."""

from moebatch.cli.as_json import AsJson, answering, print_json
from moebatch.cli.options import JobFile
from moebatch.report.console import output_console, show


def status(job: JobFile, as_json: AsJson = False) -> None:
    """Show how far a job is, over all of its shards, without disturbing it."""
    from moebatch.job.overview import overview
    from moebatch.report.overview import overview_table
    from moebatch.spec.job import load_job

    with answering(as_json):
        found = overview(load_job(job))
        if as_json:
            print_json(found.as_json(job))
        else:
            show(output_console(), overview_table(found, job))
