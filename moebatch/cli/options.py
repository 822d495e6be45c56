"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).")]
PlannedJob = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="Job file; or --model and lengths.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing unless something is wrong.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Refuse a job whose answers are not exactly the model's.")
]

Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Only the first rows of the input, for a trial."),
]

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

Schedule = Annotated[str | None, typer.Option("--schedule", help="Instead of the policy's own.")]
Gantt = Annotated[Path | None, typer.Option("--gantt", help="Draw the lanes into this SVG file.")]
