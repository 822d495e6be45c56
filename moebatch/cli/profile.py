"""``moebatch profile``."""

from pathlib import Path
from typing import Annotated

import typer

from moebatch.cli.options import Quiet
from moebatch.cli.threads import let_threads_sleep
from moebatch.report.console import error_console, logger

Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Write to this file, not to this machine's own."),
]
Read = Annotated[
    Path | None,
    typer.Option("--read", help="File or folder to read for the disk's rate, say a model."),
]

_WITH_AMX = (
    "a CPU with AMX multiplies bfloat16 faster, two cores of a Xeon with 2 TFLOP/s: "
    "`moebatch plan job.yaml --what-if dram.gemm=2TFLOP/s` says what that would change"
)


def profile(output: Output = None, read: Read = None, quiet: Quiet = False) -> None:
    """Measure this machine in about a minute: arithmetic, memory, links, and the disk of the
    current folder or of --read."""
    let_threads_sleep()
    from moebatch.measure.machine import measure_machine
    from moebatch.measure.saved import require_writable_file, save_profile, this_machine_path
    from moebatch.model.native import loader
    from moebatch.plan.machine import detect_machine

    path = output or this_machine_path()
    require_writable_file(path)
    log = logger(error_console(), quiet=quiet)
    loader.log_compiling(log)
    num_threads = detect_machine().num_cores
    measured = measure_machine(Path.cwd(), read=read, num_threads=num_threads, tell=log)
    save_profile(measured, path)
    log(f"written to {path}")
    if measured.levels["dram"].instruction_set not in ("", "amx"):
        log(_WITH_AMX)
