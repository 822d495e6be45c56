"""Puts the rows of all shards together."""

from typing import NamedTuple

from moebatch.errors import ConfigError, MoebatchError
from moebatch.folder.claim import FirstRun, claim, written_claimed
from moebatch.folder.duplicates import recorded_duplicates
from moebatch.folder.final_file import FinalFile, RowsMissing
from moebatch.folder.output_path import require_writable
from moebatch.folder.results import Answered
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import ALL
from moebatch.job.opened import OpenedJob
from moebatch.journal.finished import Finished
from moebatch.rows.prompts import row_rules
from moebatch.spec.job import Job
from moebatch.units import count_of


class Merged(NamedTuple):
    """What came of it."""

    num_rows: int
    num_failed: int
    output: str
    of_failed: str


def merge(job: Job) -> Merged:
    """Writes the output of a job whose rows have all ended, in whatever runs.

    Raises MoebatchError if some have not, LockHeld if a run still goes on, ConfigError if the
    output is of another job, InputError if the input holds no rows, and what reading and writing
    raise.
    """
    require_writable(job)
    folder = RunFolder(job.output.path)
    if not folder.path.exists():
        message = f"there is nothing to merge: no run has left {folder.path}"
        raise ConfigError.at(job.output.path, message)
    opened = OpenedJob(job)
    opened.require_own_output()
    output, source = job.output, opened.source
    with folder.locked(ALL), Finished(folder.journal) as finished:
        # Also of a folder without a manifest: later runs would not know the output for theirs.
        ours = claim(opened.manifest, folder, source, FirstRun.today(ALL))
        keys = ours.manifest.row_keys
        final = FinalFile(output.path, keys, errors=output.errors)
        duplicates = recorded_duplicates(source, Answered(finished, keys), row_rules(job))
        try:
            claimed = written_claimed(ours, folder, output.errors)
            num_rows, num_failed = final.write(source, finished, duplicates, claimed)
        except RowsMissing as missing:
            raise MoebatchError(_not_ended(missing, folder)) from None
    return Merged(num_rows, num_failed, str(job.output.path), str(job.output.of_failed))


def _not_ended(missing: RowsMissing, folder: RunFolder) -> str:
    return (
        f"{count_of(missing.num_missing, 'row has', 'rows have')} not ended yet, the first in "
        f"{missing.missing[0].place}; run the shards that have them again (`moebatch status` lists "
        f"them), then merge. What is there is kept in {folder.path}"
    )
