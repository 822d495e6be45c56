"""What programs read on standard output: one JSON object, whatever happens."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from moebatch.cli.process import naming_paths
from moebatch.errors import MoebatchError

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
        with naming_paths():
            yield
    except MoebatchError as error:
        if as_json:
            print_json(error_json(error))
        raise
