"""What a check has found, one line per fault."""

from rich.console import Console

from moebatch.job.check import Findings
from moebatch.report.console import say
from moebatch.units import count_of


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
