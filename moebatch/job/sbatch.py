"""A script that runs a job on a Slurm cluster: its shards as an array, then the merge."""

import math
import shlex
import sys
from pathlib import Path

from moebatch.errors import ConfigError
from moebatch.folder.claim import read_claim
from moebatch.folder.run_folder import RunFolder
from moebatch.job.options import Submission
from moebatch.job.slurm import notice_s, parse_time_limit
from moebatch.quoting import shown
from moebatch.spec.job import Job
from moebatch.units import count_of

_MORE_MEMORY = 1.1
"""Slurm counts the page cache and its own processes, too."""


def submission_script(job_file: Path, job: Job, asked: Submission) -> str:
    """A shell script to be run where sbatch is: it submits an array with one task for every shard,
    and a merge that waits until all of them have ended, and says so if any rows are missing.

    Each task replaces its shell (`exec`), so that signals reach it; Slurm asks it to stop two
    minutes before its time is over. It keeps what it has, asks to be queued again, and goes on from
    there. Raises ConfigError for a limit or a path that Slurm would not understand, and for another
    number of shards than the job has.
    """
    # Not what a link leads to: the paths of a job are beside the file that it is called by.
    path, of_job = job_file.absolute(), RunFolder(job.output.path)
    folder = of_job.path
    _require_agreed(of_job, asked.num_shards)
    last = asked.num_shards
    program = f"{shlex.quote(sys.executable)} -m moebatch"
    run = f'{program} run {shlex.quote(str(path))} --shard "$SLURM_ARRAY_TASK_ID/{last}"'
    lines = [
        "#!/bin/sh",
        f"# {path.name} in {count_of(last, 'shard')}, then the merge. Submit it with: sh THIS_FILE",
        f"# Shard {last} again, and then the merge: sh THIS_FILE --array={last}",
        "set -eu",
        f"mkdir -p {shlex.quote(str(folder))}",
        "shards=$(sbatch --parsable \"$@\" <<'END'",
        "#!/bin/bash",
        *_directives(_of_shards(path, job, folder, asked)),
        "# A signal before the program listens would end it, and it knows the time itself.",
        "trap '' USR1",
        f"exec {run} --quiet --requeue",
        "END",
        ")",
        "merge=$(sbatch --parsable --dependency=\"afterany:${shards%%;*}\" <<'END'",
        "#!/bin/bash",
        *_directives(_of_merge(path, folder, asked)),
        f"exec {program} merge {shlex.quote(str(path))} --quiet",
        "END",
        ")",
        'echo "shards: job ${shards%%;*}, merge: job ${merge%%;*}"',
    ]
    return "\n".join(lines) + "\n"


def _of_shards(path: Path, job: Job, folder: Path, asked: Submission) -> list[str]:
    options = [
        f"--job-name={_quoted(path.stem)}",
        f"--array=1-{asked.num_shards}",
        f"--signal=B:USR1@{notice_s(_limit_s(asked.time_limit)):.0f}",
        "--requeue",
        "--open-mode=append",
        f"--output={_log(folder, 'slurm-%A_%a.log')}",
    ]
    if asked.time_limit is not None:
        options.append(f"--time={asked.time_limit}")
    cpus = asked.cpus or job.resources.threads
    if cpus is not None:
        options.append(f"--cpus-per-task={cpus}")
    if job.resources.dram is not None:
        options.append(f"--mem={math.ceil(_MORE_MEMORY * job.resources.dram / 2**20)}M")
    return [*options, *map(_option, asked.options)]


def _option(text: str) -> str:
    """As sbatch wants it."""
    text = text.strip()
    if not text.strip("-") or not text.isprintable():
        message = f"must be one option of sbatch, such as partition=gpu, got {text!r}"
        raise _refusal("--option", message)
    return text if text.startswith("-") else f"--{text}"


def _limit_s(time_limit: str | None) -> float:
    if time_limit is None:
        return math.inf
    limit_s = parse_time_limit(time_limit)
    if limit_s is None:
        raise _refusal(
            "--time", f"must be a time such as 4:00:00 or 1-12:00:00, got {shown(time_limit)}"
        )
    return limit_s


def _require_agreed(folder: RunFolder, num_shards: int) -> None:
    """Raises ConfigError if rows are divided otherwise than by earlier runs, since every
    task would be refused."""
    claim = read_claim(folder)
    agreed = claim.first.num_shards if claim else None
    if agreed not in (None, num_shards):
        raise _refusal(
            "--shards",
            f"the rows of this job are divided into {agreed} shards, as its first run said; use "
            f"--shards {agreed}, or remove {folder.path} to begin anew",
        )


def _refusal(where: str, message: str) -> ConfigError:
    return ConfigError.at("moebatch sbatch", message, where=where)


def _of_merge(path: Path, folder: Path, asked: Submission) -> list[str]:
    name = f"--job-name={_quoted(f'{path.stem}-merge')}"
    log = f"--output={_log(folder, 'slurm-%A-merge.log')}"
    return [name, log, *map(_option, asked.options)]


def _log(folder: Path, pattern: str) -> str:
    """A file that Slurm names itself: a % of the folder stands for itself if it is written twice,
    and after a backslash none stands for anything else."""
    if "\\" in str(folder):
        raise _refusal(
            "output.path", f"Slurm writes no log below {folder}: no backslash may be in it"
        )
    return _quoted(f"{folder}/".replace("%", "%%") + pattern)


def _quoted(text: str) -> str:
    """As sbatch reads it in a line of a script. Raises ConfigError for what is no line."""
    if "\n" in text:
        raise _refusal("JOB", f"a line of a script cannot name {shown(text)}; rename it")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _directives(options: list[str]) -> list[str]:
    return [f"#SBATCH {option}" for option in options]
