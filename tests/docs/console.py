"""Runs what a page tells its reader to type, and compares what comes.

A page has a folder of its own, in which there are some prompts (`prompts.jsonl`) and a model: the
built-in one, under the path that the pages use for a large one. A block with a file's name in its
first line is that file. Commands of later blocks find what earlier ones have left.

Output is compared word by word; figures, bars and blanks may differ. A line `…` stands for any
lines, and `…` inside a line for any text. `$ echo $?` shows the exit code of the command before;
without it a command has to end with 0.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.command import moebatch
from tests.docs.pages import REPOSITORY, RUNNABLE, Block

MODEL = "models/Mixtral-8x7B-Instruct-v0.1"
"""Path of the pages' model."""
WIDTH = 100
"""Columns of the reader's terminal."""
_NUM_PROMPTS = 12
_SHELL = ("cat", "cp", "diff", "head", "ls", "mkdir", "mv", "tail")
_UNIT = r"(?:[kMGT]?i?B/s|[KMGT]i?B|[MGT]?FLOP(?:/s|/B)?|ms|µs|min|[hmsdx%])(?![A-Za-z])"
_FIGURE = re.compile(rf"[-+]?(?:\d(?:[\d.,]*\d)?(?:[dhm](?=\d)|\s?{_UNIT})?)+")
_BAR = re.compile("[█▏▎▍▌▋▊▉·]{3,}")


def prepare(folder: Path) -> None:
    """Puts there what the pages take for granted."""
    with (REPOSITORY / "jobs/demo.jsonl").open() as rows:
        (folder / "prompts.jsonl").write_text("".join(islice(rows, _NUM_PROMPTS)))
    (folder / MODEL).parent.mkdir()
    (folder / MODEL).symlink_to(REPOSITORY / "demo/model")


@dataclass(kw_only=True, slots=True)
class Command:
    """A command of a console block and what the page says comes of it."""

    words: str
    line: int
    """Line of the page on which it stands."""
    num_lines: int = 1
    """Lines that it takes itself."""
    expected: list[str] = field(default_factory=list)


def commands(block: Block) -> list[Command]:
    """The commands of a block in order; a backslash at the end of a line continues it."""
    found: list[Command] = []
    is_continued = False
    for number, line in enumerate(block.lines, start=block.line):
        if is_continued:
            found[-1].words += " " + line.strip().removesuffix("\\").rstrip()
            found[-1].num_lines += 1
        elif line.startswith("$ "):
            words = line[2:].removesuffix("\\").rstrip()
            found.append(Command(words=words, line=number))
        else:
            assert found, f"line {number}: output before any command"
            found[-1].expected.append(line)
            continue
        is_continued = line.endswith("\\")
    return found


def faults_of_page(page: list[Block], folder: Path) -> Iterator[str]:
    """Runs the blocks of a page; yields what is not as the page says."""
    for block in page:
        if block.file_name:
            (folder / block.file_name).write_text("\n".join(block.lines) + "\n")
        elif block.language in RUNNABLE and block.not_run is None:
            run = _console_faults if block.language == "console" else _python_faults
            yield from run(block, folder)


def output_of(command: Command, folder: Path) -> tuple[int, str]:
    """Exit code, and what it prints on both streams, without blank lines at the ends."""
    name, *arguments = shlex.split(command.words, comments=True)
    assert name == "moebatch" or name in _SHELL, f"{name} is no command that pages may show"
    if name == "moebatch":
        before = Path.cwd()
        os.chdir(folder)
        try:
            done = moebatch(*arguments, COLUMNS=str(WIDTH))
        finally:
            os.chdir(before)
    else:
        done = subprocess.run(
            [name, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
    return done.returncode, (done.stdout + done.stderr).strip("\n")


def _console_faults(block: Block, folder: Path) -> Iterator[str]:
    listed = commands(block)
    code = 0
    for command, later in zip(listed, [*listed[1:], None], strict=True):
        if command.words == "echo $?":
            if command.expected[:1] != [str(code)]:
                yield f"{command.line}: the exit code is {code}"
            continue
        code, output = output_of(command, folder)
        if code and (later is None or later.words != "echo $?"):
            yield f"{command.line}: {command.words}: ends with {code}:\n{output}"
        elif not matches(command.expected, output):
            yield f"{command.line}: {command.words}: prints\n{output}"


def _python_faults(block: Block, folder: Path) -> Iterator[str]:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(block.lines)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    if done.returncode:
        yield f"{block.line}: python ends with {done.returncode}:\n{done.stderr}"


def matches(expected: list[str], output: str) -> bool:
    """Whether an output is what a page shows; a page that shows nothing takes anything."""
    if not expected:
        return True
    pattern = "".join(map(_line_pattern, expected))
    loose = "".join(f"{loosened(line)}\n" for line in output.splitlines())
    return re.fullmatch(pattern, loose) is not None


def loosened(line: str) -> str:
    """A line without what may differ from run to run."""
    line = _FIGURE.sub("#", _BAR.sub("=", line.strip()))
    return re.sub(r"\s+", " ", line)


def _line_pattern(line: str) -> str:
    if line.strip() == "…":
        return r"(?:.*\n)*?"
    return ".*".join(re.escape(part) for part in loosened(line).split("…")) + r"\n"
