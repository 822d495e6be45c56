"""``moebatch sbatch``."""

from pathlib import Path
from typing import Annotated

import typer

from moebatch.cli.options import JobFile

Shards = Annotated[int, typer.Option("--shards", min=1, max=100_000, help="Tasks of the array.")]
Time = Annotated[
    str | None, typer.Option("--time", help="Limit of each task, as Slurm writes it: 4:00:00.")
]
Cpus = Annotated[int | None, typer.Option("--cpus", min=1, help="Cores of each task.")]
Further = Annotated[
    list[str] | None,
    typer.Option("--option", help="A further option of sbatch, such as partition=gpu; repeatable."),
]
Target = Annotated[
    Path | None, typer.Option("-o", "--output", help="File to write; default: the screen.")
]


def sbatch(
    job: JobFile,
    shards: Shards,
    time: Time = None,
    cpus: Cpus = None,
    option: Further = None,
    output: Target = None,
) -> None:
    """Write a script that runs a job on a Slurm cluster, in shards, and merges them."""
    from moebatch.job.sbatch import Submission, submission_script
    from moebatch.measure.saved import require_writable_file
    from moebatch.spec.job import load_job

    asked = Submission(num_shards=shards, time_limit=time, cpus=cpus, options=tuple(option or ()))
    script = submission_script(job, load_job(job), asked)
    if output is None:
        typer.echo(script, nl=False)
        return
    require_writable_file(output)
    output.write_text(script)
