"""A job from outside: how far it is, and which runs work on it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from moebatch.job.overview import Overview, ShardOverview
from moebatch.job.status_file import ShardStatus
from moebatch.report.console import plain, say, show, whole
from moebatch.report.tables import NamedRows, ShareBar, titled_columns
from moebatch.units import count_of, format_bytes, format_duration, format_number

if TYPE_CHECKING:  # they load torch, which `moebatch status` need not
    from moebatch.checkpoint.inventory import Inventory, KindOfWeights
    from moebatch.job.check import Findings


def overview_table(job: Overview, job_file: Path) -> RenderableType:
    """Rows, rate and time left, a line for each run, and what to do next."""
    grid = NamedRows(_progress(job, job_file))
    return Group(grid, "", _shards(job)) if job.shards else grid


def _progress(job: Overview, job_file: Path) -> Iterator[tuple[str, str | ShareBar]]:
    share = (job.num_done + job.num_failed) / job.num_rows if job.num_rows else 0.0
    yield "rows", ShareBar(share)
    yield "", _rows(job)
    yield "output", plain(job.output) + _what_it_lacks(job)
    if job.tokens_per_s:
        left = "" if job.eta_s is None else f", {format_duration(job.eta_s)} left"
        yield "rate", f"{_rate(job)}{left}"
    following = job.next_command(job_file)
    if following is not None:
        yield "next", whole(following)
    elif job.obstacle and not job.is_alive:
        yield "next", plain(f"cannot go on: {job.obstacle}")


def _what_it_lacks(job: Overview) -> str:
    if job.has_earlier_output:
        return " (without the rows that have ended since it was written)"
    return "" if job.has_output else " (not written yet)"


def _rate(job: Overview) -> str:
    """In tokens until rows have ended: the longest come first, and many end together."""
    if job.rows_per_s:
        return f"{job.rows_per_s * 60:.1f} rows a minute"
    return f"{job.tokens_per_s:.1f} tok/s"


def _rows(job: Overview) -> str:
    parts = [f"{job.num_done} of {job.num_rows} done"]
    if job.num_failed:
        parts.append(f"[red]{job.num_failed} failed[/]")
    if job.num_begun:
        parts.append(f"{job.num_begun} cut off, to be continued")
    return ", ".join(parts)


def _shards(job: Overview) -> Table:
    titles = "shard", "state", "done", "failed", "rows", "tok/s", "where", "heard of"
    table = titled_columns(*titles, left=titles, dim=("heard of",))
    for cells in _lines(job):
        table.add_row(*cells)
    return table


def _lines(job: Overview) -> Iterator[tuple[str, ...]]:
    """Neighbours that have not begun share one."""
    for state, group in groupby(job.shards, lambda one: one.state if one.run is None else None):
        shards = list(group)
        if state is None:
            yield from (_shard(one, one.run) for one in shards if one.run is not None)
            continue
        name = f"{shards[0].shard}" + (f" to {shards[-1].shard}" if len(shards) > 1 else "")
        yield name, state, *_counts(shards), "", "", ""


def _shard(one: ShardOverview, run: ShardStatus) -> tuple[str, ...]:
    where = f"{run.host}, process {run.pid}"
    if run.job_id:
        where += f", Slurm job {run.job_id}"
    return (
        str(one.shard),
        "[red]lost[/]" if one.state == "lost" else plain(one.state),
        *_counts([one]),
        f"{run.tokens_per_s:.1f}",
        plain(where),
        f"{format_duration(max(0.0, time.time() - run.updated))} ago",
    )


def _counts(shards: list[ShardOverview]) -> Iterator[str]:
    """Rows that are done, that have failed, and all."""
    yield str(sum(one.num_done for one in shards))
    yield str(sum(one.num_failed for one in shards))
    yield str(sum(one.num_rows for one in shards))


def _weights_view(weights: "Inventory") -> RenderableType:
    """Numbers, bytes and formats of each kind."""
    table = titled_columns(
        *("weights", "million", "bytes", "bits", "format"), left=("weights", "format")
    )
    for kind in weights.kinds:
        table.add_row(
            kind.kind,
            format_number(kind.num_numbers / 1e6),
            format_bytes(kind.num_bytes),
            f"{8 * kind.num_bytes / max(kind.num_numbers, 1):.3g}",
            plain(_formats(kind)),
        )
    if weights.unread:
        named = f"{count_of(len(weights.unread), 'tensor')}, such as {plain(weights.unread[0])}"
        table.add_row("not read", "", format_bytes(weights.unread_bytes), "", named)
    if weights.claimed is None:
        return Group(table, "")
    is_so = "as" if weights.is_as_claimed else "[yellow]not[/] as"
    claim = f"{plain(weights.claimed)}, {is_so} their tensors say"
    return Group(table, "", f"config.json says of experts: {claim}", "")


def _formats(kind: "KindOfWeights") -> str:
    """That which most weights have first."""
    counts = sorted(kind.formats.items(), key=lambda item: -item[1])
    if len(counts) == 1:
        return counts[0][0]
    return "; ".join(f"{count_of(count, 'weight')} in {name}" for name, count in counts)


@contextmanager
def counting_bytes(console: Console) -> Iterator[Callable[[int], None]]:
    """Yields what takes how many more bytes have been read; silent without a terminal."""
    bar = Progress(
        TextColumn("reading weights"),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None, visible=False)
        yield lambda num_bytes: bar.update(task, advance=num_bytes, visible=True)


def print_findings(findings: "Findings", console: Console) -> None:
    """What the weights are, all faults with file and line, then one line of summary."""
    if findings.weights:
        show(console, _weights_view(findings.weights))
    for warning in findings.warnings:
        say(console, f"warning: {warning}")
    for fault in findings.faults:
        code = f" [{fault.code}]" if fault.code else ""
        say(console, f"{fault}{code}")
    if not findings.faults:
        rows = f"{count_of(findings.num_rows, 'row')}, " if findings.num_rows else ""
        say(console, f"{rows}no faults")
        return
    unlisted = findings.num_unlisted
    more = f" (and {count_of(unlisted, 'more bad row')})" if unlisted else ""
    rows = f"; {findings.num_bad_rows} of {count_of(findings.num_rows, 'row')} bad"
    shown = rows if findings.num_rows else ""
    say(console, f"{count_of(len(findings.faults), 'fault')}{more}{shown}")
