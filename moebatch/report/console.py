"""Lines on a terminal or in a log file, as they are."""

import codecs
import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import IO, Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

from moebatch.quoting import presentable

_LOG_WIDTH = 160
_WORD = re.compile(r"(?:`[^`\n]*`|\S)+\s*")
"""Text between backticks is a command or a name that users copy: it stays whole."""
_KEPT_BLANK = "\ue000"
"""Stands for a blank at which no line ends, until lines have been divided."""


def error_console() -> Console:
    """Standard error; in a log file lines are longer than rich would guess."""
    return _console(stderr=True)


def output_console() -> Console:
    """Standard output, in the same way."""
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    said = os.environ.get("COLUMNS")
    width = None if is_terminal or said is not None else _LOG_WIDTH
    if said is not None and said.isdigit() and not int(said):  # unknown; rich would print nothing
        width = shutil.get_terminal_size().columns if is_terminal else _LOG_WIDTH
    file = None if stream is None else cast(IO[str], _Heard(stream))
    return Console(file=file, stderr=stderr, highlight=False, width=width)


_IN_PLAIN = "moebatch.in_plain"
_LIKE = {"█": "#", "·": ".", "…": "...", "µ": "u", "–": "-", "−": "-", "→": "->"}
_NOBODY_READS = (errno.EIO, errno.EPIPE)


class _Heard:
    """A terminal that may be closed while a run goes on, or a pipe whose reader may end: what is
    written from then on is lost. rich would end the process, its standard output first."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Says that all of it was written."""
        with self._closing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Shows what was written."""
        with self._closing():
            self._stream.flush()

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            _write_nowhere(self._stream)


def show(console: Console, view: RenderableType) -> None:
    """Prints a view; where it is no terminal that fills its lines, these end with their last
    word."""
    if console.is_terminal:
        console.print(view, crop=False)
        return
    with console.capture() as captured:
        console.print(view, crop=False)
    for line in captured.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)


def say(console: Console, line: str) -> None:
    """Prints a line without looking for markup in it; on a terminal it is broken between words
    only, and never within a command. Characters by which files could command a terminal are shown
    as their codes."""
    _print_words(console, Text(presentable(line)))


def wrapped(text: Text, width: int | None) -> Iterator[Text]:
    """Lines of a text, divided between words; a longer word has a line of its own, and more than
    the width if need be. Without a width only where the text itself has line ends."""
    for line in text.split(allow_blank=True):
        for part in line.divide(_places(line.plain, width)) if width else [line]:
            part.rstrip()
            part.plain = part.plain.replace(_KEPT_BLANK, " ")
            part.no_wrap, part.overflow = True, "ignore"
            yield part


def plain(text: str) -> str:
    """Text for a cell of a table: neither markup nor commands."""
    return escape(presentable(text))


def whole(text: str) -> str:
    """`plain` for text that users copy: it stays in one line."""
    return plain(text).replace(" ", _KEPT_BLANK)


def logger(console: Console, *, quiet: bool) -> Callable[[str], None]:
    """A function that prints lines for the user; with `quiet` it prints nothing."""
    return (lambda line: None) if quiet else lambda line: say(console, line)


def print_in_any_locale() -> None:
    """What the encoding of this locale does not have is a sign like it from now on, or a question
    mark, and no error: Latin-1 has no bars."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            codecs.register_error(_IN_PLAIN, _in_plain)
            stream.reconfigure(errors=_IN_PLAIN)


def drop_what_cannot_be_written() -> None:
    """The end of the process does not fail over what is left for a stream on a full disk."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _write_nowhere(stream)


def _write_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def make_logs_presentable() -> None:
    """Logs and warnings of libraries quote files, too: from now on `presentable` cleans them."""
    make = logging.getLogRecordFactory()

    def presentable_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with suppress(Exception):  # format and arguments may not match; logging reports that
            record.msg, record.args = presentable(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(presentable_record)
    logging.captureWarnings(True)
    # It warns of a home folder that is read-only, and draws all the same.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def print_error(message: str) -> None:
    """Prints a mistake that the user can correct."""
    text = Text.assemble(("error:", "bold red"), " ", presentable(message))
    _print_words(error_console(), text)


def _print_words(console: Console, text: Text) -> None:
    for line in wrapped(text, console.width if console.is_terminal else None):
        console.print(line, soft_wrap=True)


def _places(line: str, width: int) -> Sequence[int]:
    """Where new lines begin."""
    places, used = [], 0
    for word in _WORD.finditer(line):
        if used and used + cell_len(word[0].rstrip()) > width:
            places.append(word.start())
            used = 0
        used += cell_len(word[0])
    return places


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """Signs like those that an encoding lacks, so that a full bar is no empty one."""
    assert isinstance(error, UnicodeEncodeError), "asked for where text is written"
    lacking = error.object[error.start : error.end]
    return "".join(_LIKE.get(sign, "?") for sign in lacking), error.end
