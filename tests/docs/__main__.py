"""Puts today's output into the console blocks of the pages: `make docs`.

Outputs with `…` stay as they are, since the author of the page chose which part to show; where
today's output does not have that part, it is printed.
"""

import tempfile
from pathlib import Path

from tests.docs.console import Command, commands, faults_of_page, matches, output_of, prepare
from tests.docs.pages import PAGES, REPOSITORY, Block, blocks


def main() -> None:
    """Rewrites the pages in place."""
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            _refresh(page, Path(folder))


def _refresh(page: Path, folder: Path) -> None:
    prepare(folder)
    text = page.read_text()
    lines: list[str] = text.splitlines()
    shift = 0
    for block in blocks(text):
        if block.language != "console" or block.not_run is not None:
            _report(page, block, folder)
            continue
        for command in commands(block):
            shift += _renew(lines, command, shift, folder, page)
    page.write_text("\n".join(lines) + "\n")


def _report(page: Path, block: Block, folder: Path) -> None:
    for fault in faults_of_page([block], folder):
        print(f"{page.relative_to(REPOSITORY)}:{fault}")


def _renew(lines: list[str], command: Command, shift: int, folder: Path, page: Path) -> int:
    """Puts in what a command prints today; returns how many lines that is more than before."""
    if command.words == "echo $?":
        return 0
    _, output = output_of(command, folder)
    shown = command.expected
    if not shown:
        return 0
    if any("…" in line for line in shown):
        if not matches(shown, output):
            print(
                f"{page.relative_to(REPOSITORY)}:{command.line}: the part shown is not in\n{output}"
            )
        return 0
    first = command.line - 1 + command.num_lines + shift
    today = [line.rstrip() for line in output.splitlines()]
    lines[first : first + len(shown)] = today
    return len(today) - len(shown)


if __name__ == "__main__":
    main()
