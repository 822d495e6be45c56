"""What programs read on standard output: one JSON object, whatever happens."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from moebatch.errors import ConfigError, Fault, MoebatchError
from moebatch.quoting import shown

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; all else goes to standard error.")
]


def print_json(content: Mapping[str, Any]) -> None:
    """The object, over several lines."""
    typer.echo(json.dumps(content, indent=2))


def error_json(error: MoebatchError) -> dict[str, Any]:
    """What ended a command."""
    return {"exit_code": int(error.exit_code), "error": str(error)}


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """While the block runs, an error that ends the command is an object, too, if one is wanted."""
    try:
        with naming_long_paths():
            yield
    except MoebatchError as error:
        if as_json:
            print_json(error_json(error))
        raise


@contextmanager
def naming_long_paths() -> Iterator[None]:
    """While the block runs, a name that no file system takes is a mistake of the user."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        message = "is longer than a path can be"
        raise ConfigError([Fault(file=shown(str(error.filename)), message=message)]) from error
