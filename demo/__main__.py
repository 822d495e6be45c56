"""`python -m demo rows` writes a demo job, `... mark` marks what a runner made of it."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.marking import PASS_SHARE, Mark, mark_files
from demo.rows import demo_rows
from moebatch.errors import ExitCode, MoebatchError
from moebatch.units import count_of


def mark_table(mark: Mark) -> Table:
    """Right answers by kind of task, as a table."""
    table = Table("task", title="demo tasks")
    table.add_column("right", justify="right")
    table.add_column("of", justify="right")
    for kind, total in sorted(mark.total.items()):
        table.add_row(kind, str(mark.right[kind]), str(total))
    table.add_section()
    table.add_row("all", str(sum(mark.right.values())), str(sum(mark.total.values())))
    return table


def _print_mark(mark: Mark) -> None:
    console = Console()
    console.print(mark_table(mark))
    if mark.num_unanswered:
        console.print(f"{count_of(mark.num_unanswered, 'row has', 'rows have')} no answer")
    if mark.num_unasked:
        console.print(
            f"{count_of(mark.num_unasked, 'answer belongs', 'answers belong')} to no row of the job"
        )
    verdict = "passed" if mark.passed else "failed"
    console.print(f"{100 * mark.share:.1f} % right, {100 * PASS_SHARE:.0f} % needed: {verdict}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows", help="print the rows of a demo job")
    rows.add_argument("--count", type=int, default=200)
    rows.add_argument("--seed", type=int, default=1)
    marking = commands.add_parser("mark", help="mark answers; exit code 1 if too many are wrong")
    marking.add_argument("job", type=Path, help="input rows of the batch")
    marking.add_argument("answers", type=Path, help="output rows of the batch")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "rows":
        for row in demo_rows(options.seed, options.count):
            print(row)
        return 0
    try:
        mark = mark_files(options.job, options.answers)
    except MoebatchError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return error.exit_code
    except OSError as error:
        Console(stderr=True).print(f"cannot read: {error}", style="red", markup=False)
        return ExitCode.INPUT
    _print_mark(mark)
    return ExitCode.OK if mark.passed else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
