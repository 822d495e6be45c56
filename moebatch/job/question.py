"""A planning question asked by a job file."""

from collections.abc import Callable
from dataclasses import asdict, replace

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.job.limits import require_within_levels, require_within_machine
from moebatch.job.machine import JobMachine
from moebatch.job.opened import OpenedJob
from moebatch.job.planning import in_fastest_dtype, job_problem, measured_machine
from moebatch.job.scan import sample_workload
from moebatch.model.native import loader
from moebatch.plan.options import PlanOptions
from moebatch.plan.problem import Problem
from moebatch.plan.question import Question, changed_profile, figure_notes, stored_as
from moebatch.spec.job import AttentionSection, Job
from moebatch.spec.machine.hardware import LEVELS, LevelName
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.workload import Workload

TOKENISED_ROWS = 1000
_RUN_BYTES = 8 * 2**20
"""What a run holds at this point and a question about it does not: what reading all rows leaves in
the tokenizer, and modules; up to 7 MB in measurements."""
_RUN_ROW_BYTES = 104
"""The same for each row, measured with 20,000 and 100,000 rows."""


def job_question(
    job: Job, options: PlanOptions, log: Callable[[str], None] = lambda line: None
) -> Question:
    """The job on this machine, as `moebatch run` would plan it, or on the one of ``--hw``. `log`
    gets what takes time.

    Raises what reading job, model and input raises.
    """
    job = _as_asked(job, options)
    if options.hw is None:
        require_within_machine(job)
        loader.log_compiling(log)
    opened = OpenedJob(job)
    files, hints = opened.files, opened.hints
    _require_learnt(opened, options)
    workload, notes = _workload(opened)
    machine = _machine(job, files, options)
    profile = changed_profile(machine.profile, options.figures)
    said: list[str] = []
    files = in_fastest_dtype(job, files, machine, said.append)
    problem = _problem(job, files, workload, replace(machine, profile=profile), options)
    dtypes = stored_as(problem.dtypes, options.stored, problem.shape)
    schedule = opened.schedule(None, has_policy=options.policy is not None)
    problem = replace(problem, dtypes=dtypes, habits=hints.habits, schedule=schedule)
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


def _require_learnt(opened: OpenedJob, options: PlanOptions) -> None:
    """Raises CheckpointError where a run would: a file that the policy wants is not there."""
    given = options.given_policy()
    if given is not None and given.policy.predictor is not None:
        opened.hints.predictor(given.policy.predictor)


def _machine(job: Job, files: ModelFiles, options: PlanOptions) -> JobMachine:
    """That of the job, or the one of ``--hw`` with all that it has."""
    if options.hw is None:
        return measured_machine(job, files, lambda line: None)
    profile = load_profile(options.hw)
    return JobMachine(kind="cuda" if "vram" in profile.levels else "cpu", profile=profile)


def _workload(opened: OpenedJob) -> tuple[Workload, tuple[str, ...]]:
    reader = opened.reader
    workload = sample_workload(
        opened.source, reader.parse, reader.request, most_rows=TOKENISED_ROWS
    )
    sampled = f"lengths are those of at most {TOKENISED_ROWS} rows, evenly taken"
    many = (workload.num_sequences or 0) > TOKENISED_ROWS
    return workload, (*reader.warnings, *([sampled] if many else []))


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
        problem = _counted_as_in_run(job_problem(job, files, workload, hardware, machine.kind))
        for level in _changed(options) & problem.hardware.levels.keys():
            problem = problem.with_capacity(level, hardware.levels[level].capacity_bytes)
        return problem
    require_within_levels(job, hardware)
    problem = Problem(
        shape=files.shape, dtypes=files.dtypes, hardware=hardware, workload=workload
    ).as_cached
    for level in hardware.levels:
        budget: int | None = getattr(job.resources, level)
        if budget is not None:
            problem = problem.with_capacity(level, budget)
    return problem


def _counted_as_in_run(problem: Problem) -> Problem:
    """The problem of a process that has looked at all rows, so that a policy which fits here fits
    into the run that is given it."""
    more = _RUN_BYTES + _RUN_ROW_BYTES * (problem.workload.num_sequences or 0)
    held = {**problem.program_bytes, "dram": problem.program_bytes["dram"] + more}
    return replace(problem, program_bytes=held)


def _changed(options: PlanOptions) -> set[LevelName]:
    """Levels to which ``--what-if`` gives another capacity."""
    named = {change.partition("=")[0].strip() for change in options.what_if}
    return {level for level in LEVELS if not named.isdisjoint((level, f"{level}.capacity"))}


def _as_asked(job: Job, options: PlanOptions) -> Job:
    """The same job with all of the levels whose capacity is another, and the cache and attention
    asked for."""
    changes: dict[str, object] = dict.fromkeys(_changed(options))
    caches = {"kv_cache": options.kv_cache, "state_cache": options.state_cache}
    changes |= {name: how for name, how in caches.items() if how is not None}
    update: dict[str, object] = {"resources": job.resources.model_copy(update=changes)}
    if options.sink_window is not None:
        attention = AttentionSection(**asdict(options.sink_window))
        update["model"] = job.model.model_copy(update={"attention": attention})
    return job.model_copy(update=update)
