"""Lines on a terminal or in a log file, as they are."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.markup import escape

from moebatch.quoting import presentable

_LOG_WIDTH = 160


def error_console() -> Console:
    """Standard error; in a log file lines are longer than rich would guess."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_LOG_WIDTH)


def say(console: Console, line: str) -> None:
    """Prints a line without looking for markup in it, and without breaking it. Characters by which
    files could command a terminal are shown as their codes."""
    console.print(presentable(line), markup=False, highlight=False, soft_wrap=True)


def plain(text: str) -> str:
    """Text for a cell of a table: neither markup nor commands."""
    return escape(presentable(text))


def teller(console: Console, *, quiet: bool) -> Callable[[str], None]:
    """What takes lines for the user; `quiet` swallows them."""
    return (lambda line: None) if quiet else lambda line: say(console, line)


def tame_libraries() -> None:
    """What libraries log or warn of quotes files, too: from now on it is made presentable."""
    make = logging.getLogRecordFactory()

    def presentable_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with suppress(Exception):  # words and arguments may not go together; logging says so
            record.msg, record.args = presentable(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(presentable_record)
    logging.captureWarnings(True)


def complain(message: str) -> None:
    """Says what a user has to mend."""
    console = error_console()
    console.print("[bold red]error:[/] ", end="")
    say(console, message)
