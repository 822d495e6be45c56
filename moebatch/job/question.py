"""A planning question asked by a job file."""

from collections.abc import Iterable
from dataclasses import replace

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.job.hints import load_hints
from moebatch.job.limits import require_within_levels, require_within_machine
from moebatch.job.machine import JobMachine
from moebatch.job.planning import in_fastest_dtype, job_problem, measured_machine, settled
from moebatch.job.scan import sample_workload
from moebatch.plan.machine import detect_machine
from moebatch.plan.options import PlanOptions
from moebatch.plan.problem import Problem
from moebatch.plan.question import Question, changed_profile, figure_notes
from moebatch.rows.prepare import prepare
from moebatch.rows.source import open_source
from moebatch.spec.hardware import LEVELS, LevelName
from moebatch.spec.job import Job
from moebatch.spec.profile import load_profile
from moebatch.spec.workload import Workload

TOKENISED_ROWS = 1000


def job_question(job: Job, options: PlanOptions) -> Question:
    """The job on this machine, as `moebatch run` would plan it, or on the one of ``--hw``.

    Raises what reading job, model and input raises.
    """
    job = _without_budgets(job, _changed(options))
    if options.hw is None:
        require_within_machine(job, detect_machine())
    files = open_model(job.model.path, job.model.dtype)
    hints = load_hints(job, files)
    workload, notes = _workload(job, files)
    machine = _machine(job, files, options)
    profile = changed_profile(machine.profile, options.what_if)
    said: list[str] = []
    files = in_fastest_dtype(job, files, machine, said.append)
    problem = _problem(job, files, workload, replace(machine, profile=profile), options)
    if options.hw is None:
        problem = settled(problem)
    problem = replace(problem, habits=hints.habits)
    return Question(
        problem=problem,
        model=job.model.name or job.model.path.name,
        notes=(
            *machine.notes,
            *said,
            *hints.warnings,
            *notes,
            *figure_notes(profile, options.basis),
        ),
        wishes=hints.wishes,
    )


def _machine(job: Job, files: ModelFiles, options: PlanOptions) -> JobMachine:
    """That of the job, or the one of ``--hw`` with all that it has."""
    if options.hw is None:
        return measured_machine(job, files, lambda line: None)
    profile = load_profile(options.hw)
    return JobMachine(kind="cuda" if "vram" in profile.levels else "cpu", profile=profile)


def _workload(job: Job, files: ModelFiles) -> tuple[Workload, tuple[str, ...]]:
    preparation = prepare(
        job, vocab_size=files.shape.vocab_size, max_positions=files.shape.max_positions
    )
    reader = preparation.reader
    workload = sample_workload(
        open_source(job.input.path), reader.parse, reader.request, most_rows=TOKENISED_ROWS
    )
    sampled = f"lengths are those of at most {TOKENISED_ROWS} rows, evenly taken"
    many = (workload.num_sequences or 0) > TOKENISED_ROWS
    return workload, (*preparation.warnings, *([sampled] if many else []))


def _problem(
    job: Job,
    files: ModelFiles,
    workload: Workload,
    machine: JobMachine,
    options: PlanOptions,
) -> Problem:
    """On another machine the job has all of it, as far as its budgets go."""
    hardware = machine.hardware(options.basis)
    if options.hw is None:
        problem = job_problem(job, files, workload, hardware, machine.kind)
        for level in _changed(options) & problem.hardware.levels.keys():
            problem = problem.with_capacity(level, hardware.levels[level].capacity_bytes)
        return problem
    require_within_levels(job, hardware)
    problem = Problem(shape=files.shape, dtypes=files.dtypes, hardware=hardware, workload=workload)
    for level in hardware.levels:
        budget: int | None = getattr(job.resources, level)
        if budget is not None:
            problem = problem.with_capacity(level, budget)
    return problem


def _changed(options: PlanOptions) -> set[LevelName]:
    """Levels to which ``--what-if`` gives another capacity."""
    named = {change.partition("=")[0].strip() for change in options.what_if}
    return {level for level in LEVELS if not named.isdisjoint((level, f"{level}.capacity"))}


def _without_budgets(job: Job, levels: Iterable[LevelName]) -> Job:
    """The same job with all of those levels."""
    resources = job.resources.model_copy(update=dict.fromkeys(levels))
    return job.model_copy(update={"resources": resources})
