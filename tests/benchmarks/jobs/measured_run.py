"""`moebatch run`, whose summary also goes into a file as JSON.

python -m tests.benchmarks.jobs.measured_run SUMMARY.json run JOB.yaml [OPTIONS]
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from moebatch.cli.process import let_threads_sleep


def main() -> None:
    let_threads_sleep()  # as the command does, and before torch is loaded
    from moebatch import cli
    from moebatch.job import run as job_run
    from moebatch.job.status import RunSummary

    path, arguments = Path(sys.argv[1]), sys.argv[2:]

    class KeptRun(job_run.JobRun):
        def execute(self) -> RunSummary:
            summary = super().execute()
            figures = asdict(replace(summary, policy=None, waits=None))
            figures["policy"] = None if summary.policy is None else str(summary.policy)
            path.write_text(json.dumps(figures, default=str))
            return summary

    job_run.JobRun = KeptRun  # type: ignore[misc]
    sys.argv = ["moebatch", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
