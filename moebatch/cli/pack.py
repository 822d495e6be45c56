"""``moebatch pack``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moebatch.cli.parameters import Dram, ModelFolder, Quiet
from moebatch.cli.process import carried_out
from moebatch.errors import ConfigError, Fault
from moebatch.quoting import shown
from moebatch.report.console import error_console, show
from moebatch.spec.option import dram_bytes

if TYPE_CHECKING:
    from moebatch.packing.encodings import Precision

To = Annotated[
    str | None, typer.Option("--to", help="What experts are written as: int4, int8 or fp8.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", help="The new model folder; default: beside MODEL, as MODEL-TO."
    ),
]
Group = Annotated[
    int | None,
    typer.Option("--group", help="Weights that share a scale, for int4: 64 or 32."),
]
Bits = Annotated[
    float | None,
    typer.Option(
        "--bits", help="Of a code in the mean, such as 4.5: experts that matter more get 8."
    ),
]
Text = Annotated[
    Path | None,
    typer.Option("--text", help="Also measure perplexity on it, before and after: as calibrate."),
]
Tokens = Annotated[
    int, typer.Option("--tokens", min=2, max=2**24, help="Tokens of the text that are read.")
]


def pack(
    model: ModelFolder,
    to: To = None,
    output: Output = None,
    group: Group = None,
    bits: Bits = None,
    dram: Dram = None,
    text: Text = None,
    tokens: Tokens = 65536,
    quiet: Quiet = False,
) -> None:
    """Write a smaller checkpoint, its experts in 4 or 8 bits, which other programs read as well."""
    precision, limit = _precision(to), dram_bytes(dram)
    if group is not None and (precision != "int4" or group not in (64, 32)):
        raise _refused("--group", "is 64 or 32, and for --to int4 only")
    if bits is not None and (precision != "int4" or not 4 < bits < 8):
        raise _refused("--bits", "is between 4 and 8, such as 4.5, and for --to int4 only")
    from moebatch.packing.pack import Pack, PackOrder
    from moebatch.report.packing import pack_view

    source = model.absolute()
    name = f"{source.name}-{precision}" if bits is None else f"{source.name}-{bits:g}bit"
    order = PackOrder(
        model=source,
        to=precision,
        output=(output or source.with_name(name)).absolute(),
        group=group,
        bits=bits,
        dram_bytes=limit,
        text=text,
        num_tokens=tokens,
    )
    summary = carried_out(
        partial(Pack, order), doing="packing", kept="files are written", quiet=quiet
    )
    if not quiet:
        show(error_console(), pack_view(summary))


def _precision(to: str | None) -> "Precision":
    match to:
        case "int4" | "int8" | "fp8":
            return to
        case None:
            raise _refused("--to", "is needed: int4, int8 or fp8")
    raise _refused("--to", f"must be int4, int8 or fp8, got {shown(to)}")


def _refused(option: str, message: str) -> ConfigError:
    return ConfigError([Fault(file="moebatch pack", where=option, message=message)])
