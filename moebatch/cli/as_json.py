"""What programs read on standard output: one JSON object, whatever happens."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from typing import Annotated, Any, TextIO

import typer

from moebatch.cli.process import explaining_refusals
from moebatch.errors import MoebatchError

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; all else goes to standard error.")
]
_OUTPUT: ContextVar[TextIO | None] = ContextVar("_OUTPUT", default=None)
"""Standard output, while what others print goes elsewhere."""


def print_json(content: Mapping[str, Any]) -> None:
    """The object, over several lines."""
    typer.echo(json.dumps(content, indent=2), file=_OUTPUT.get())


def error_json(error: MoebatchError) -> dict[str, Any]:
    """What ended a command."""
    return {"exit_code": int(error.exit_code), "error": str(error)}


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """While the block runs, an error that ends the command is an object, too, if one is wanted;
    what anything else prints, such as a user's own schedule, then goes to standard error."""
    try:
        with explaining_refusals(), _others_aside() if as_json else nullcontext():
            yield
    except MoebatchError as error:
        if as_json:
            print_json(error_json(error))
        raise


@contextmanager
def _others_aside() -> Iterator[None]:
    before = _OUTPUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _OUTPUT.reset(before)
