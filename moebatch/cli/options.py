"""Arguments and options that several commands have."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from moebatch.errors import ConfigError, Fault
from moebatch.units import parse_bytes

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).")]
PlannedJob = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="Job file; or --model and lengths.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing unless something is wrong.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Refuse a job whose answers are not exactly the model's.")
]

Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Only the first rows of the input, for a trial."),
]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder.")]
Dram = Annotated[str | None, typer.Option("--dram", help="Limit of main memory, such as 4GiB.")]


def dram_bytes(dram: str | None) -> int | None:
    """The limit in bytes. Raises ConfigError."""
    try:
        return None if dram is None else parse_bytes(dram)
    except ValueError as error:
        raise ConfigError([Fault(file="--dram", message=str(error))]) from None


# --- what is asked about, instead of a job ------------------------------------------------------

Hw = Annotated[
    str | None,
    typer.Option("--hw", help="Hardware profile, a name or a file; default: this machine."),
]
Model = Annotated[
    str | None, typer.Option("--model", help="Model shape, a name, a folder or a file.")
]
PromptLen = Annotated[
    int | None, typer.Option("--prompt-len", min=1, max=10**7, help="Mean prompt tokens.")
]
GenLen = Annotated[
    int | None, typer.Option("--gen-len", min=1, max=10**7, help="New tokens per sequence.")
]
Requests = Annotated[
    int | None, typer.Option("--requests", min=1, max=10**12, help="Sequences of the job.")
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option("--what-if", help="Change a figure, such as dram=416GiB; repeatable."),
]

# --- schedules and what is drawn of them --------------------------------------------------------

Schedule = Annotated[
    str | None,
    typer.Option("--schedule", help="Instead of the policy's own: a name, or file.py:name."),
]


def either(endings: Sequence[str]) -> str:
    """``.svg, .png or .pdf``."""
    *others, last = endings
    return f"{', '.join(others)} or {last}"


def named(*endings: str) -> Callable[[Path | None], Path | None]:
    """A check of the suffix of a file, which says what is written into it, before anything runs.
    Pipes and devices may have any name."""

    def check(path: Path | None) -> Path | None:
        is_file = path is not None and (path.is_file() or not path.exists())
        if path is not None and is_file and not path.name.lower().endswith(endings):
            raise typer.BadParameter(f"must end in {either(endings)}, got {str(path)!r}")
        return path

    return check


PICTURES = (".svg", ".html", ".png", ".pdf")
TRACES = (".json", ".json.gz")
Gantt = Annotated[
    Path | None,
    typer.Option(
        "--gantt",
        callback=named(*PICTURES),
        help=f"Draw the lanes into this file: {either(PICTURES)}.",
    ),
]
