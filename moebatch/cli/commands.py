"""All commands under one name, and those that are a call and its exit code."""

import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import moebatch
from moebatch.calibration.order import CalibrationOrder
from moebatch.cli.as_json import AsJson, answering, print_json
from moebatch.cli.parameters import JobFile, Quiet, require_places, with_options
from moebatch.cli.plan import plan
from moebatch.cli.process import (
    carried_out,
    explaining_refusals,
    hear_interrupts,
    let_threads_sleep,
    require_current_folder,
)
from moebatch.cli.run import run
from moebatch.cli.simulate import simulate
from moebatch.errors import ExitCode, MoebatchError, OutOfMemory
from moebatch.job.options import CheckOptions, Submission
from moebatch.packing.order import PackOrder
from moebatch.quoting import reason
from moebatch.report.console import (
    drop_what_cannot_be_written,
    error_console,
    logger,
    make_logs_presentable,
    output_console,
    print_error,
    print_in_any_locale,
    show,
)
from moebatch.units import count_of

Checked = Annotated[
    Path, typer.Argument(metavar="JOB", help="Job file (YAML), or a model: folder or GGUF file.")
]
Checksums = Annotated[
    bool,
    typer.Option("--checksums", help="Read all weights, and compare checksums where known."),
]
Script = Annotated[
    Path | None, typer.Option("-o", "--output", help="File to write; default: the screen.")
]
Profile = Annotated[
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


def merge(job: JobFile, quiet: Quiet = False) -> None:
    """Write the output of a job whose shards have all been run."""
    from moebatch.job.merge import merge as merged_rows
    from moebatch.spec.job import load_job

    num_rows, num_failed, output, of_failed = merged_rows(load_job(job))
    failed = f", {num_failed} of them failed (see {of_failed})" if num_failed else ""
    log = logger(error_console(), quiet=quiet and not num_failed)
    log(f"{count_of(num_rows, 'row')}{failed}: {output}")
    raise typer.Exit(ExitCode.ROWS_FAILED if num_failed else ExitCode.OK)


def status(job: JobFile, as_json: AsJson = False) -> None:
    """Show how far a job is, shard by shard, without disturbing it."""
    from moebatch.job.overview import overview
    from moebatch.report.overview import overview_table
    from moebatch.spec.job import load_job

    with answering(as_json):
        found = overview(load_job(job))
        if as_json:
            print_json(found.as_json(job))
        else:
            show(output_console(), overview_table(found, job))


@with_options
def sbatch(job: JobFile, asked: Submission, output: Script = None) -> None:
    """Write a Slurm script that runs a job in shards and merges them."""
    from moebatch.job.sbatch import submission_script
    from moebatch.spec.files.text_file import write_text
    from moebatch.spec.job import load_job

    require_places("moebatch sbatch", {"--output": output}, {"JOB": job})
    script = submission_script(job, load_job(job), asked)
    if output is None:
        typer.echo(script, nl=False)
        return
    write_text(output, script)


@with_options
def check(
    job: Checked, options: CheckOptions, checksums: Checksums = False, as_json: AsJson = False
) -> None:
    """List every fault of job file, input and checkpoint. Each has its line; nothing is run."""
    from moebatch.job.check import check_job
    from moebatch.report.overview import counting_bytes, print_findings

    console = error_console()
    with answering(as_json), counting_bytes(console) as count_bytes:
        counter, log = count_bytes if checksums else None, logger(console, quiet=False)
        findings = check_job(job, options, checksums=counter, log=log)
    if as_json:
        print_json(findings.as_json())
    else:
        print_findings(findings, output_console())
    raise typer.Exit(findings.exit_code)


def profile(output: Profile = None, read: Read = None, quiet: Quiet = False) -> None:
    """Measure this machine, which takes about three minutes. That is arithmetic, memory, links, and
    the disk of the current folder or of --read."""
    let_threads_sleep()
    from moebatch.measure.machine import measure_machine
    from moebatch.measure.process_limits import detect_machine
    from moebatch.measure.saved import require_writable_file, save_profile, this_machine_path
    from moebatch.model.native import loader
    from moebatch.store.memory import is_out_of_memory

    path = output or this_machine_path()
    require_writable_file(path)
    log = logger(error_console(), quiet=quiet)
    loader.log_compiling(log)
    num_threads = detect_machine().num_cores
    try:
        measured = measure_machine(Path.cwd(), read=read, num_threads=num_threads, log=log)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        refusal = f"the system refuses memory to measure in: {reason(error)}"
        raise OutOfMemory(f"{refusal}; allow this process more") from error
    save_profile(measured, path)
    log(f"written to {path}")
    if measured.levels["dram"].instruction_set not in ("", "amx"):
        log(_WITH_AMX)


@with_options
def calibrate(order: CalibrationOrder, quiet: Quiet = False) -> None:
    """Learn from a text which experts follow which. Runs load the right ones early by it."""
    order.require_consistent()
    let_threads_sleep()
    from moebatch.calibration.calibrate import Calibration
    from moebatch.report.calibration import calibration_view

    begin = partial(Calibration, replace(order, model=order.model.absolute()))
    summary = carried_out(begin, doing="reading", kept="tokens are read", quiet=quiet)
    if not quiet:
        show(error_console(), calibration_view(summary))


@with_options
def pack(order: PackOrder, quiet: Quiet = False) -> None:
    """Write a smaller checkpoint, its experts in 4 or 8 bits. Other programs read it as well."""
    order.require_consistent()
    from moebatch.packing.pack import Pack
    from moebatch.report.packing import pack_view

    begin = partial(Pack, replace(order, model=order.model.absolute()))
    summary = carried_out(begin, doing="packing", kept="files are written", quiet=quiet)
    if not quiet:
        show(error_console(), pack_view(summary))


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
    require_current_folder()


def main() -> None:
    """Entry point: a user's mistake is a message and an exit code, never a traceback."""
    print_in_any_locale()
    make_logs_presentable()
    try:
        with explaining_refusals():
            app(standalone_mode=True)
    except MoebatchError as error:
        with suppress(OSError):  # there may be no room for this either
            print_error(str(error))
        drop_what_cannot_be_written()
        sys.exit(error.exit_code)
