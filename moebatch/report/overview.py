"""A job from outside: how far it is, and who is at work."""

import time

from rich.console import Group, RenderableType
from rich.table import Table

from moebatch.job.overview import Overview
from moebatch.job.status_file import ShardStatus
from moebatch.report.console import plain
from moebatch.report.tables import named_rows, share_bar, titled_columns
from moebatch.units import format_duration


def overview_table(job: Overview) -> RenderableType:
    """Rows, rate and time left, and a line for each run."""
    grid = named_rows()
    share = (job.num_done + job.num_failed) / job.num_rows if job.num_rows else 1.0
    grid.add_row("rows", share_bar(share))
    grid.add_row("", _rows(job))
    grid.add_row("output", plain(job.output) + ("" if job.has_output else " (not written yet)"))
    if job.rows_per_s:
        left = "" if job.eta_s is None else f", {format_duration(job.eta_s)} left"
        grid.add_row("rate", f"{job.rows_per_s * 60:.1f} rows a minute{left}")
    return Group(grid, "", _shards(job)) if job.shards else grid


def _rows(job: Overview) -> str:
    parts = [f"{job.num_done} of {job.num_rows} done"]
    if job.num_failed:
        parts.append(f"[red]{job.num_failed} failed[/]")
    if job.num_begun:
        parts.append(f"{job.num_begun} cut off, to be gone on with")
    return ", ".join(parts)


def _shards(job: Overview) -> Table:
    table = titled_columns()
    for title in ("shard", "state", "done", "failed", "rows", "tok/s", "where", "heard of"):
        table.add_column(title, style="dim" if title == "heard of" else None)
    for shard in sorted(job.shards, key=lambda shard: [int(n) for n in shard.shard.split("/")]):
        table.add_row(*_shard(shard))
    return table


def _shard(shard: ShardStatus) -> tuple[str, ...]:
    where = f"{shard.host}, process {shard.pid}"
    if shard.job_id:
        where += f", Slurm job {shard.job_id}"
    is_lost = not shard.is_alive and shard.state not in ("done", "stopped", "failed")
    return (
        shard.shard,
        "[red]lost[/]" if is_lost else plain(shard.state),
        str(shard.done),
        str(shard.failed),
        str(shard.rows),
        f"{shard.tokens_per_s:.1f}",
        plain(where),
        f"{format_duration(max(0.0, time.time() - shard.updated))} ago",
    )
