"""A planning question asked by a job file."""

from moebatch.engine.model_files import ModelFiles, open_model
from moebatch.job.planning import job_problem, job_profile
from moebatch.job.prepare import prepare
from moebatch.job.scan import sample_workload
from moebatch.job.source import open_source
from moebatch.plan.options import PlanOptions
from moebatch.plan.problem import Problem
from moebatch.plan.question import Question, changed_profile, figure_notes
from moebatch.spec.hardware import LevelName
from moebatch.spec.job import Job
from moebatch.spec.profile import HardwareProfile, load_profile
from moebatch.spec.workload import Workload

TOKENISED_ROWS = 1000


def job_question(job: Job, options: PlanOptions) -> Question:
    """The job on this machine, as `moebatch run` would plan it, or on the one of ``--hw``.

    Raises what reading job, model and input raises.
    """
    files = open_model(job.model.path, job.model.dtype)
    workload, notes = _workload(job, files)
    if options.hw is None:
        profile, known = job_profile(job, files, lambda line: None)
        notes = (*known, *notes)
    else:
        profile = load_profile(options.hw)
    profile = changed_profile(profile, options.what_if)
    problem = _problem(job, files, workload, profile, options)
    return Question(
        problem=problem,
        model=job.model.name or job.model.path.name,
        notes=(*notes, *figure_notes(profile, options.basis)),
    )


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
    profile: HardwareProfile,
    options: PlanOptions,
) -> Problem:
    """On another machine the job has all of it, as far as its budgets go."""
    hardware = profile.hardware(options.basis)
    names = (change.partition("=")[0].strip() for change in options.what_if)
    changed = {name.removesuffix(".capacity") for name in names}
    if options.hw is None:
        problem = job_problem(job, files, workload, hardware)
        if "dram" in changed:
            problem = problem.with_capacity("dram", hardware.dram.capacity_bytes)
        return problem
    problem = Problem(shape=files.shape, dtypes=files.dtypes, hardware=hardware, workload=workload)
    budgets: dict[LevelName, int | None] = {
        "dram": job.resources.dram,
        "vram": job.resources.vram,
        "disk": job.resources.disk,
    }
    for level, budget in budgets.items():
        if budget is not None and level in hardware.levels and level not in changed:
            capacity = hardware.levels[level].capacity_bytes
            problem = problem.with_capacity(level, min(budget, capacity))
    return problem
