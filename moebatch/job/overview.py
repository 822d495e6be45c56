"""How far a job is, over all of its shards, from files alone."""

import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError, ConfigError, StorageError
from moebatch.folder.claim import Claim, Manifest, read_claim, require_own, require_own_errors
from moebatch.folder.duplicates import recorded_duplicates
from moebatch.folder.output_path import require_writable
from moebatch.folder.results import Answered
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import ALL, Shard
from moebatch.job.job_fields import job_fields, supposed_manifest
from moebatch.job.status_file import ShardStatus, read_status
from moebatch.journal.finished import Finished
from moebatch.rows.parse import RowRules
from moebatch.rows.prompts import row_rules
from moebatch.rows.row import Source, no_rows
from moebatch.rows.source import open_source
from moebatch.spec.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Rows by what the journals say of them now."""

    num_rows: int
    num_done: int
    num_failed: int
    """Rows with an error in the place of an answer; not among those done."""

    @property
    def num_left(self) -> int:
        return self.num_rows - self.num_done - self.num_failed


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOverview(RowCounts):
    """The rows of a shard, and the last run of it."""

    shard: Shard
    run: ShardStatus | None
    """None if none has begun."""

    @property
    def is_alive(self) -> bool:
        """Whether a run of it goes on."""
        return self.run is not None and self.run.is_alive

    @property
    def state(self) -> str:
        """``lost`` is a run that is gone without a word."""
        if self.run is None:
            return "not begun" if self.num_left else "done"
        return self.run.state if self.run.has_ended or self.run.is_alive else "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview(RowCounts):
    """All rows of an input, and the runs that go on."""

    output: str
    has_output: bool
    """Whether it has all that has ended."""
    has_earlier_output: bool = False
    """Whether there is one that lacks rows which have ended since."""
    num_begun: int
    """Rows that were cut off, of which tokens are kept."""
    shards: tuple[ShardOverview, ...]
    """All that there are, and before them all rows if a run has had them."""
    obstacle: str | None = None
    """Why no run could go on, as far as that is known without a look at the model."""

    @property
    def is_alive(self) -> bool:
        """Whether any run goes on."""
        return any(shard.is_alive for shard in self.shards)

    @property
    def rows_per_s(self) -> float:
        """Of all runs that go on."""
        return sum(one.run.rows_per_s for one in self.shards if one.run and one.is_alive)

    @property
    def tokens_per_s(self) -> float:
        """The same of tokens of answers."""
        return sum(one.run.tokens_per_s for one in self.shards if one.run and one.is_alive)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last of the runs that go on ends; None if none is, if one of them
        does not know, or if rows are left that none of them answers."""
        working = [shard for shard in self.shards if shard.is_alive]
        left = [shard.run.left_s if shard.run else None for shard in working]
        known = [left_s for left_s in left if left_s is not None]
        is_known = bool(known) and len(known) == len(left)
        has_all = sum(shard.num_left for shard in working) >= self.num_left
        return max(known) if is_known and has_all else None

    def next_command(self, job_file: Path) -> str | None:
        """What brings the job further; None if nothing has to be done."""
        job = shlex.quote(str(job_file))
        if self.is_alive or self.obstacle:
            return None
        if not self.num_left:
            return None if self.has_output else f"moebatch merge {job}"
        waiting = [one.shard for one in self.shards if one.num_left and not one.shard.is_all]
        return f"moebatch run {job}" + (f" --shard {waiting[0]}" if waiting else "")

    def as_json(self, job_file: Path) -> dict[str, Any]:
        """Plain data."""
        return {
            "output": self.output,
            "has_output": self.has_output,
            "rows": self.num_rows,
            "done": self.num_done,
            "failed": self.num_failed,
            "cut_off": self.num_begun,
            "left": self.num_left,
            "rows_per_s": self.rows_per_s,
            "tokens_per_s": self.tokens_per_s,
            "eta_s": self.eta_s,
            "next": self.next_command(job_file),
            "obstacle": self.obstacle,
            "shards": [_shard_json(one) for one in self.shards],
        }


def overview(job: Job) -> Overview:
    """Reads journals and the input. Raises InputError and StorageError, and ConfigError if the run
    folder is damaged."""
    folder = RunFolder(job.output.path)
    claim = read_claim(folder)
    runs = {run.of: run for run in map(read_status, folder.statuses) if run is not None}
    shards = set(runs)
    if claim and claim.first.num_shards:
        num_shards = claim.first.num_shards
        shards |= {Shard(number, num_shards) for number in range(1, num_shards + 1)}
    keys = claim.manifest.row_keys if claim else RowKeys()
    with Finished(folder.journal) as finished:
        source = open_source(job.input.path)
        counts = _count(source, Answered(finished, keys), row_rules(job), {ALL, *shards})
    in_order = sorted(shards, key=lambda shard: (shard.count, shard.number))
    whole = _counted(ALL, counts[1], None)
    is_ours = job.output.path.exists() and claim is not None and claim.first.is_written is not False
    written_bytes = claim.first.journal_bytes if claim else None
    has_output = is_ours and written_bytes == folder.journal_bytes
    return Overview(
        output=str(job.output.path),
        has_output=has_output,
        has_earlier_output=is_ours and not has_output,
        num_rows=whole.num_rows,
        num_done=whole.num_done,
        num_failed=whole.num_failed,
        num_begun=counts[1][0, "part"],
        shards=tuple(_counted(one, counts[one.count], runs.get(one)) for one in in_order),
        obstacle=_obstacle(job, claim, source, is_done=has_output and not whole.num_left),
    )


def _count(
    source: Source, answered: Answered, rules: RowRules, shards: Collection[Shard]
) -> Mapping[int, Counter[tuple[int, str | None]]]:
    """Rows by the number of shards, their place among these, and what has become of them."""
    counts = {shard.count: Counter[tuple[int, str | None]]() for shard in shards}
    duplicates = recorded_duplicates(source, answered, rules)
    for raw in source:
        found = answered.of(raw, is_duplicate=duplicates.error_of(raw) is not None)
        for count, counter in counts.items():
            counter[raw.index % count, found.state if found else None] += 1
    return counts


def _obstacle(job: Job, claim: Claim | None, source: Source, *, is_done: bool) -> str | None:
    """What a run would be refused with. Where a job is done nothing has to be written any more."""
    folder, is_empty = RunFolder(job.output.path), next(iter(source), None) is None
    try:
        if not is_done:
            require_writable(job)
        if claim is None:
            manifest = Manifest(fields=job_fields(job))
        else:
            manifest = supposed_manifest(job, claim.manifest)
        before = require_own(manifest, folder, source)
        require_own_errors(before, folder, job.output.errors)
    except (ConfigError, CheckpointError, StorageError) as error:
        return str(error)
    return str(no_rows(str(source.path))) if is_empty else None


def _counted(
    shard: Shard, counts: Mapping[tuple[int, str | None], int], run: ShardStatus | None
) -> ShardOverview:
    num = {
        state: counts.get((shard.number - 1, state), 0) for state in ("done", "fail", "part", None)
    }
    return ShardOverview(
        shard=shard,
        num_rows=sum(num.values()),
        num_done=num["done"],
        num_failed=num["fail"],
        run=run,
    )


_OF_RUN = ("host", "pid", "job_id", "updated", "rows_per_s", "tokens_per_s")


def _shard_json(one: ShardOverview) -> dict[str, Any]:
    return {
        "shard": str(one.shard),
        "state": one.state,
        "alive": one.is_alive,
        "rows": one.num_rows,
        "done": one.num_done,
        "failed": one.num_failed,
        **{name: getattr(one.run, name, None) for name in _OF_RUN},
    }
