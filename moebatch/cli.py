"""The commands: parse, call, render, exit code. What they do is done below."""

import enum
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import moebatch
from moebatch.errors import ConfigError, ExitCode, Fault, Interrupted, MoebatchError
from moebatch.units import parse_bytes

if TYPE_CHECKING:
    from moebatch.job.options import RunOptions
    from moebatch.plan.options import PlanOptions
    from moebatch.plan.question import Question
    from moebatch.schedule.timeline import Timeline

_LOG_WIDTH = 160


class Method(enum.StrEnum):
    """Choices of ``--method``."""

    MILP = "milp"
    KLOTSKI = "klotski"


class SimulatedWork(enum.StrEnum):
    """Choices of ``--work``."""

    DECODE = "decode"
    PREFILL = "prefill"
    MEAN = "mean"


app = typer.Typer(
    name="moebatch",
    help="Answers a file of prompts with a Mixture-of-Experts model larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing unless something is wrong.")]


@app.command()
def run(
    job: JobFile,
    quiet: Quiet = False,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Run this policy instead of planning one.")
    ] = None,
    recalibrate: Annotated[
        bool,
        typer.Option("--recalibrate", help="Keep what the run shows of this machine's speed."),
    ] = False,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="Instead of the policy's own.")
    ] = None,
    sync: Annotated[
        bool,
        typer.Option("--sync", help="Everything one after the other: the reference, on the CPU."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a Chrome trace (.json or .json.gz) of first passes."),
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option("--gantt", help="Draw the lanes into this SVG file.")
    ] = None,
    trace_passes: Annotated[
        int, typer.Option("--trace-passes", min=1, max=1000, help="How many of them.")
    ] = 8,
) -> None:
    """Run a job: read its prompts, write its answers in the same order."""
    _let_threads_sleep()
    from moebatch.job.options import RunOptions
    from moebatch.job.run import JobRun
    from moebatch.report.progress import watching
    from moebatch.report.summary import failed_rows, stopped_early, summary_table
    from moebatch.spec.job import load_job
    from moebatch.spec.policy_file import load_policy

    console = _error_console()

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    given = None if policy is None else load_policy(policy)
    options = RunOptions(
        policy=given,
        schedule=schedule,
        is_plain=sync,
        num_traced_passes=trace_passes,
        trace=trace,
        gantt=gantt,
    )
    options.require_consistent()
    job_run = JobRun(load_job(job), tell, options)
    try:
        with watching(job_run.status, console, quiet=quiet):
            summary = job_run.execute()
    except KeyboardInterrupt:
        raise Interrupted(stopped_early(job_run.status())) from None
    if not quiet:
        console.print(summary_table(summary))
    elif summary.num_failed:
        console.print(failed_rows(summary), markup=False, highlight=False, soft_wrap=True)
    if options.is_drawn:
        _draw(job_run.timelines(), options, tell)
    if recalibrate:
        job_run.recalibrate(summary)
    raise typer.Exit(ExitCode.ROWS_FAILED if summary.num_failed else ExitCode.OK)


@app.command()
def plan(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Job file; or --model and lengths.")
    ] = None,
    hw: Annotated[
        str | None,
        typer.Option("--hw", help="Hardware profile, a name or a file; default: this machine."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model shape, a name, a folder or a file.")
    ] = None,
    prompt_len: Annotated[
        int | None, typer.Option("--prompt-len", min=1, max=10**7, help="Mean prompt tokens.")
    ] = None,
    gen_len: Annotated[
        int | None, typer.Option("--gen-len", min=1, max=10**7, help="New tokens per sequence.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, max=10**12, help="Sequences of the job.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="Change a figure, such as dram=416GiB; repeatable."),
    ] = None,
    method: Annotated[Method, typer.Option("--method", help="How to choose the policy.")] = (
        Method.MILP
    ),
    paper: Annotated[
        bool, typer.Option("--paper", help="MoE-Lightning's own forms and constants.")
    ] = False,
    vendor: Annotated[
        bool, typer.Option("--vendor", help="Figures of data sheets instead of measured ones.")
    ] = False,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Predict this policy, a name or a file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the policy to this file.")
    ] = None,
    roofline: Annotated[
        Path | None, typer.Option("--roofline", help="Draw the rooflines into this SVG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Tell what to expect: policy, tokens per second, time, memory, what binds, what would help."""
    from moebatch.plan.answers import answer_policy_file, answer_question
    from moebatch.plan.as_json import answer_json
    from moebatch.plan.options import PlanOptions
    from moebatch.report.plan import plan_svg, plan_view
    from moebatch.spec.policy_file import load_policy
    from moebatch.spec.text_file import write_text

    options = PlanOptions(
        has_job=job is not None,
        hw=hw,
        model=model,
        prompt_len=prompt_len,
        gen_len=gen_len,
        requests=requests,
        what_if=tuple(what_if or ()),
        method=method.value,
        paper=paper,
        vendor=vendor,
        policy=policy,
    )
    options.require_consistent()
    given = None if policy is None else load_policy(policy)
    question = _stated_question(options) if job is None else _job_question(job, options)
    answer = answer_question(question, options, given)
    if roofline is not None:
        write_text(roofline, plan_svg(answer))
    if output is not None:
        write_text(output, answer_policy_file(answer).to_yaml())
    if as_json:
        typer.echo(json.dumps(answer_json(answer), indent=2))
    else:
        Console(highlight=False).print(plan_view(answer))


@app.command()
def simulate(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="Job file; or --model and lengths.")
    ] = None,
    hw: Annotated[
        str | None,
        typer.Option("--hw", help="Hardware profile, a name or a file; default: this machine."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model shape, a name, a folder or a file.")
    ] = None,
    prompt_len: Annotated[
        int | None, typer.Option("--prompt-len", min=1, max=10**7, help="Mean prompt tokens.")
    ] = None,
    gen_len: Annotated[
        int | None, typer.Option("--gen-len", min=1, max=10**7, help="New tokens per sequence.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, max=10**12, help="Sequences of the job.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="Change a figure, such as dram=416GiB; repeatable."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="This policy, a name or a file; default: plan.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="Instead of the policy's own.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="More schedules, such as multi,hot.")
    ] = None,
    work: Annotated[
        SimulatedWork, typer.Option("--work", help="What the passes have to do.")
    ] = SimulatedWork.DECODE,
    passes: Annotated[int, typer.Option("--passes", min=1, max=1000, help="How many.")] = 3,
    skew: Annotated[
        float, typer.Option("--skew", min=0, max=10, help="Experts are liked as rank**-SKEW.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63, help="Of the routing.")] = 0,
    routing: Annotated[
        Path | None, typer.Option("--routing", help="Trace of what gates chose, not a skew.")
    ] = None,
    num_hot: Annotated[
        int | None,
        typer.Option("--num-hot", min=0, max=65536, help="Experts loaded ahead of their gates."),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=2, max=65536, help="Slots of experts, not the policy's."),
    ] = None,
    durations: Annotated[
        Path | None, typer.Option("--durations", help="File of seconds by kinds of tasks.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Chrome trace (.json or .json.gz).")
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option("--gantt", help="Draw the lanes into this SVG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show what every lane would do under one schedule or several, and what it would wait for."""
    from moebatch.plan.answers import answer_question
    from moebatch.plan.durations import load_durations
    from moebatch.plan.options import PlanOptions
    from moebatch.plan.simulation import SimOptions, simulation_json, simulations
    from moebatch.predict.trace_routing import load_routing
    from moebatch.report.chrome_trace import write_chrome_trace
    from moebatch.report.gantt import gantt_svg
    from moebatch.report.simulation import simulated_view
    from moebatch.spec.policy_file import load_policy
    from moebatch.spec.text_file import write_text

    options = PlanOptions(
        has_job=job is not None,
        hw=hw,
        model=model,
        prompt_len=prompt_len,
        gen_len=gen_len,
        requests=requests,
        what_if=tuple(what_if or ()),
        policy=policy,
        command="moebatch simulate",
    )
    options.require_consistent()
    asked = SimOptions(
        schedule=schedule,
        compare=tuple(name.strip() for name in (compare or "").split(",") if name.strip()),
        num_passes=passes,
        work=work.value,
        skew=skew,
        seed=seed,
        num_hot=num_hot,
        num_slots=slots,
        table={} if durations is None else load_durations(durations),
    )
    asked.require_known()
    given = None if policy is None else load_policy(policy)
    question = _stated_question(options) if job is None else _job_question(job, options)
    if routing is not None:
        asked = replace(asked, routing=load_routing(routing, question.problem.shape))
    answer = answer_question(question, options, given)
    simulated = simulations(answer.problem, answer.policy, asked)
    timelines = {str(name): one.timeline for name, one in simulated.items()}
    if trace is not None:
        write_chrome_trace(trace, timelines)
    if gantt is not None:
        write_text(
            gantt, gantt_svg(timelines, title=f"{answer.model} on {answer.problem.hardware.name}")
        )
    if as_json:
        typer.echo(json.dumps(simulation_json(answer, simulated), indent=2))
    else:
        Console(highlight=False).print(simulated_view(answer, simulated))


@app.command()
def check(job: JobFile) -> None:
    """Check job file, input and checkpoint without running; list every fault with its line."""
    from moebatch.job.check import check_job
    from moebatch.report.findings import print_findings

    findings = check_job(job)
    print_findings(findings, Console())
    raise typer.Exit(findings.exit_code)


@app.command()
def profile(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write to this file, not to this machine's own."),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--read", help="File or folder to read for the disk's rate, say a model."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Measure this machine in about a minute: arithmetic, memory, links, and the disk of the
    current folder or of --read."""
    _let_threads_sleep()
    from moebatch.measure.machine import measure_machine
    from moebatch.measure.saved import require_writable_folder, save_profile, this_machine_path
    from moebatch.plan.machine import detect_machine

    path = output or this_machine_path()
    console = _error_console()

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    require_writable_folder(path)
    measured = measure_machine(
        Path.cwd(), read=read, num_threads=detect_machine().num_cores, tell=tell
    )
    save_profile(measured, path)
    tell(f"written to {path}")


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder.")],
    text: Annotated[
        Path | None,
        typer.Option("--text", help="Text like that of your jobs: .txt, or the input of one."),
    ] = None,
    path_length: Annotated[
        int, typer.Option("--path-length", min=1, max=8, help="Layers back that are looked at.")
    ] = 1,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=2**24, help="Tokens of the text that are read.")
    ] = 65536,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write to this file, not beside the model."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write what all tokens chose to this file.")
    ] = None,
    dram: Annotated[
        str | None, typer.Option("--dram", help="Most main memory, such as 4GiB.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Read a text and keep which experts follow which, so that runs load the right ones early."""
    if text is None:
        message = "is needed: a text like those of your jobs, as .txt, or the input file of a job"
        raise ConfigError([Fault(file="--text", message=message)])
    dram_bytes = None if dram is None else _bytes_of("--dram", dram)
    _let_threads_sleep()
    from moebatch.job.calibrate import Calibration, CalibrationOrder
    from moebatch.report.calibration import calibration_view, reading_bar

    console = _error_console()

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    order = CalibrationOrder(
        model=model.absolute(),
        text=text,
        path_length=path_length,
        num_tokens=tokens,
        dram_bytes=dram_bytes,
        output=output,
        trace=trace,
    )
    try:
        with reading_bar(console, quiet=quiet) as advance:
            summary = Calibration(order, tell, advance).execute()
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C; no table was written") from None
    if not quiet:
        console.print(calibration_view(summary))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"moebatch {moebatch.__version__}")
        raise typer.Exit


def _stated_question(options: "PlanOptions") -> "Question":
    """Of a model by name or shape: nothing of it has to be here."""
    from moebatch.measure.saved import machine_profile
    from moebatch.plan.question import stated_question
    from moebatch.spec.profile import load_profile

    profile, notes = (load_profile(options.hw), ()) if options.hw is not None else machine_profile()
    return stated_question(profile, options).noted(notes)


def _job_question(job: Path, options: "PlanOptions") -> "Question":
    """Of a job file: its model, a sample of its rows, this machine."""
    _let_threads_sleep()
    from moebatch.job.question import job_question
    from moebatch.spec.job import load_job

    return job_question(load_job(job), options)


def _draw(
    timelines: "Mapping[str, Timeline]", options: "RunOptions", tell: Callable[[str], None]
) -> None:
    """Writes what was asked for of the passes that were traced. Raises StorageError."""
    from moebatch.report.chrome_trace import write_chrome_trace
    from moebatch.report.gantt import gantt_svg
    from moebatch.spec.text_file import write_text

    if not timelines:
        tell("there is nothing to draw: no pass was computed")
        return
    if options.trace is not None:
        write_chrome_trace(options.trace, timelines)
        tell(f"trace: {options.trace}, for ui.perfetto.dev")
    if options.gantt is not None:
        write_text(options.gantt, gantt_svg(timelines))
        tell(f"picture: {options.gantt}")


def _bytes_of(option: str, size: str) -> int:
    """Bytes of an option's value. Raises ConfigError."""
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise ConfigError([Fault(file=option, message=str(error))]) from None


def main() -> None:
    """Entry point: a user's mistake is a message and an exit code, never a traceback."""
    try:
        app(standalone_mode=True)
    except MoebatchError as error:
        _complain(str(error))
        sys.exit(error.exit_code)


def _error_console() -> Console:
    """Standard error; in a log file lines are longer than rich would guess."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_LOG_WIDTH)


def _let_threads_sleep() -> None:
    """Before torch is loaded: its threads should sleep, not spin, while they have nothing to do.

    Spinning ones keep readers, the progress display and other people's processes off the cores,
    which then makes every parallel operation wait for a thread that is not running.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _complain(message: str) -> None:
    console = _error_console()
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False, highlight=False, soft_wrap=True)
