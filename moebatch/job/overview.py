"""How far a job is, over all of its shards, from files alone."""

from dataclasses import dataclass

from moebatch.folder.answered import Answered
from moebatch.folder.claim import read_claim
from moebatch.folder.duplicates import recorded_duplicates
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.job.status_file import ShardStatus, read_status
from moebatch.journal.finished import Finished
from moebatch.rows.source import open_source
from moebatch.spec.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """Rows of an input by what has become of them, and who is at work."""

    output: str
    has_output: bool
    num_rows: int
    num_done: int
    num_failed: int
    """Rows with an error in the place of an answer; not among those done."""
    num_begun: int
    """Rows that were cut off, of which tokens are kept."""
    shards: tuple[ShardStatus, ...]

    @property
    def num_left(self) -> int:
        """Rows that have not ended."""
        return self.num_rows - self.num_done - self.num_failed

    @property
    def rows_per_s(self) -> float:
        """Of all runs that are at work."""
        return sum(shard.rows_per_s for shard in self.shards if shard.is_alive)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last of the runs that are at work ends; None if none is, if one of them
        does not know, or if rows are left that none of them answers."""
        working = [shard for shard in self.shards if shard.is_alive]
        left = [shard.left_s for shard in working]
        known = [left_s for left_s in left if left_s is not None]
        num_rows = sum(shard.rows - shard.done for shard in working)
        return (
            max(known) if known and len(known) == len(left) and num_rows >= self.num_left else None
        )


def overview(job: Job) -> Overview:
    """Reads journals and the input. Raises InputError and StorageError, and ConfigError if the run
    folder is damaged."""
    folder = RunFolder(job.output.path)
    claim = read_claim(folder)
    keys = claim.manifest.row_keys if claim else RowKeys()
    counts = {"done": 0, "fail": 0, "part": 0, None: 0}
    with Finished(folder.journal) as finished:
        answered = Answered(finished, keys)
        source = open_source(job.input.path)
        duplicates = recorded_duplicates(source, answered)
        for raw in source:
            found = answered.of(raw, is_duplicate=duplicates.error_of(raw) is not None)
            counts[found.state if found else None] += 1
    return Overview(
        output=str(job.output.path),
        has_output=job.output.path.exists(),
        num_rows=sum(counts.values()),
        num_done=counts["done"],
        num_failed=counts["fail"],
        num_begun=counts["part"],
        shards=tuple(filter(None, map(read_status, folder.statuses))),
    )
