"""What a check shows: how much it has read, and what it has found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from moebatch.job.check import Findings
from moebatch.report.console import say
from moebatch.units import count_of


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


def print_findings(findings: Findings, console: Console) -> None:
    """All faults with file and line, then one line of summary."""
    for warning in findings.warnings:
        say(console, f"warning: {warning}")
    for fault in findings.faults:
        code = f" [{fault.code}]" if fault.code else ""
        say(console, f"{fault}{code}")
    if not findings.faults:
        say(console, f"{count_of(findings.num_rows, 'row')}, no faults")
        return
    unlisted = findings.num_unlisted
    more = f" (and {count_of(unlisted, 'more bad row')})" if unlisted else ""
    rows = f"{findings.num_bad_rows} of {count_of(findings.num_rows, 'row')}"
    say(console, f"{count_of(len(findings.faults), 'fault')}{more}, {rows}")
