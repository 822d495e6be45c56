"""Lines on a terminal or in a log file, as they are."""

import re
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

_LOG_WIDTH = 160
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tabs and line ends, and what turns the direction of text."""


def error_console() -> Console:
    """Standard error; in a log file lines are longer than rich would guess."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_LOG_WIDTH)


def say(console: Console, line: str) -> None:
    """Prints a line without looking for markup in it, and without breaking it. Characters by which
    files could command a terminal are shown as their codes."""
    console.print(harmless(line), markup=False, highlight=False, soft_wrap=True)


def plain(text: str) -> str:
    """Text for a cell of a table: neither markup nor commands."""
    return escape(harmless(text))


def harmless(text: str) -> str:
    """Text of which no character commands a terminal."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def teller(console: Console, *, quiet: bool) -> Callable[[str], None]:
    """What takes lines for the user; `quiet` swallows them."""
    return (lambda line: None) if quiet else lambda line: say(console, line)


def complain(message: str) -> None:
    """Says what a user has to mend."""
    console = error_console()
    console.print("[bold red]error:[/] ", end="")
    say(console, message)
