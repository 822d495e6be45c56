"""``moebatch calibrate``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebatch.cli.options import Dram, ModelFolder, Quiet, dram_bytes
from moebatch.cli.signals import saying_what_is_kept
from moebatch.cli.threads import let_threads_sleep
from moebatch.errors import ConfigError, Fault
from moebatch.quoting import shown
from moebatch.report.console import error_console, logger, show

if TYPE_CHECKING:
    from moebatch.calibration.calibrate import Calibration
    from moebatch.calibration.order import CalibrationOrder

Text = Annotated[
    Path | None,
    typer.Option("--text", help="Text like that of your jobs: .txt, or the input of one."),
]
PathLength = Annotated[
    int, typer.Option("--path-length", min=1, max=8, help="Layers back that the table counts.")
]
Tokens = Annotated[
    int, typer.Option("--tokens", min=1, max=2**24, help="Tokens of the text that are read.")
]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write to this file, not beside the model."),
]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Write what all tokens chose to this file.")
]
Predictors = Annotated[
    list[str] | None,
    typer.Option(
        "--predictor",
        help="Predictors to train beside the table: token, next-gate, learned or all; repeatable.",
    ),
]
Gating = Annotated[
    str | None,
    typer.Option("--gating", help="Also learn when one expert is enough: adaptive."),
]
Loss = Annotated[
    float,
    typer.Option(
        "--loss", min=0.0, max=100.0, help="Highest loss of perplexity from gating, in percent."
    ),
]
Pregate = Annotated[
    bool,
    typer.Option("--pregate", help="Train gates to choose for a later layer (minutes)."),
]
Level = Annotated[
    int, typer.Option("--level", min=1, max=3, help="Layers with experts ahead, for --pregate.")
]


def calibrate(
    model: ModelFolder,
    text: Text = None,
    path_length: PathLength = 1,
    tokens: Tokens = 65536,
    output: Output = None,
    trace: Trace = None,
    predictor: Predictors = None,
    gating: Gating = None,
    loss: Loss = 1.0,
    pregate: Pregate = False,
    level: Level = 1,
    dram: Dram = None,
    quiet: Quiet = False,
) -> None:
    """Read a text and keep which experts follow which, so that runs load the right ones early."""
    given_text, limit = _given(text), dram_bytes(dram)
    gating_loss = _gating_loss(gating, loss)
    let_threads_sleep()
    from moebatch.calibration.lessons import parse_predictors
    from moebatch.calibration.order import CalibrationOrder

    order = CalibrationOrder(
        model=model.absolute(),
        text=given_text,
        path_length=path_length,
        num_tokens=tokens,
        dram_bytes=limit,
        output=output,
        trace=trace,
        predictors=parse_predictors(predictor or ()),
        gating_loss=gating_loss,
        activation_level=level if pregate else None,
    )
    _execute(order, quiet=quiet)


def _execute(order: "CalibrationOrder", *, quiet: bool) -> None:
    from moebatch.calibration.calibrate import Calibration
    from moebatch.report.calibration import calibration_view
    from moebatch.report.progress import share_bar

    console = error_console()
    with share_bar("reading", console, quiet=quiet) as advance:
        calibration = Calibration(order, logger(console, quiet=quiet), advance)
        with saying_what_is_kept(lambda: _left(calibration)):
            summary = calibration.execute()
    if not quiet:
        show(console, calibration_view(summary))


def _left(calibration: "Calibration") -> str:
    """What an interrupted calibration has kept."""
    if not calibration.num_kept:
        return "nothing is kept yet"
    return f"{calibration.num_kept} tokens are read and kept: the same command continues after them"


def _given(text: Path | None) -> Path:
    if text is None:
        message = "is needed: a text like those of your jobs, as .txt, or the input file of a job"
        raise ConfigError([Fault(file="--text", message=message)])
    return text


def _gating_loss(gating: str | None, percent: float) -> float | None:
    if gating not in (None, "adaptive"):
        message = f"must be adaptive, got {shown(gating)}"
        raise ConfigError([Fault(file="moebatch calibrate", where="--gating", message=message)])
    return None if gating is None else percent / 100
