"""Lines on a terminal or in a log file, as they are."""

from collections.abc import Callable

from rich.console import Console

_LOG_WIDTH = 160


def error_console() -> Console:
    """Standard error; in a log file lines are longer than rich would guess."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_LOG_WIDTH)


def say(console: Console, line: str) -> None:
    """Prints a line without looking for markup in it, and without breaking it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def teller(console: Console, *, quiet: bool) -> Callable[[str], None]:
    """What takes lines for the user; `quiet` swallows them."""
    return (lambda line: None) if quiet else lambda line: say(console, line)


def complain(message: str) -> None:
    """Says what a user has to mend."""
    console = error_console()
    console.print("[bold red]error:[/] ", end="")
    say(console, message)
