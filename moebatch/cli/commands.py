"""All commands under one name."""

import sys
from typing import Annotated

import typer

import moebatch
from moebatch.cli.calibrate import calibrate
from moebatch.cli.check import check
from moebatch.cli.merge import merge
from moebatch.cli.pack import pack
from moebatch.cli.plan import plan
from moebatch.cli.profile import profile
from moebatch.cli.run import run
from moebatch.cli.sbatch import sbatch
from moebatch.cli.signals import hear_interrupts
from moebatch.cli.simulate import simulate
from moebatch.cli.status import status
from moebatch.errors import MoebatchError
from moebatch.report.console import make_logs_presentable, print_error

app = typer.Typer(
    name="moebatch",
    help="Answers a file of prompts with a Mixture-of-Experts model larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (run, merge, status, sbatch, plan, simulate, check, profile, calibrate, pack):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    hear_interrupts()
    if version:
        typer.echo(f"moebatch {moebatch.__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: a user's mistake is a message and an exit code, never a traceback."""
    make_logs_presentable()
    try:
        app(standalone_mode=True)
    except MoebatchError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
