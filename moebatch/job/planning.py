"""A job as a planning problem: its model, its rows, and what it may take of a machine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from moebatch.checkpoint.model_files import COMPUTE_DTYPES, ModelFiles
from moebatch.engine.spec import shares_beginnings
from moebatch.errors import ConfigError, DoesNotFit
from moebatch.job.limits import (
    disk_to_spare,
    dram_bytes,
    fills_disk_of_model,
    num_threads,
    require_within_levels,
)
from moebatch.job.machine import JobMachine, NotedProfile, has_unmeasured_gpu, job_machine
from moebatch.layout.ladder import stages_pages
from moebatch.measure.machine import measure_machine
from moebatch.measure.saved import load_saved, machine_profile
from moebatch.measure.sizes import quick_sizes
from moebatch.model.gpu import loader as gpu
from moebatch.model.native import loader
from moebatch.plan.answer import best_for
from moebatch.plan.expert_choice import ExpertChoice, Wishes
from moebatch.plan.fitting import fitted, policy_for, slot_notes, with_room
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.pricing.compute_dtypes import fastest_dtypes, without_emulation
from moebatch.plan.problem import PROGRAM_BYTES_WITH_GPU, Problem
from moebatch.plan.runnable import not_runnable, require_none, require_schedule
from moebatch.plan.search.refusal import too_large, too_small
from moebatch.spec.job import Job
from moebatch.spec.machine.hardware import CONTEXT_BYTES, DeviceKind, Dtype, Hardware, LevelName
from moebatch.spec.policy.file import PolicyFile
from moebatch.spec.policy.policy import Policy
from moebatch.spec.workload import Workload
from moebatch.store.memory import is_out_of_memory, resident_bytes
from moebatch.units import format_bytes, format_unlike

_UNMEASURED_GPU = (
    "the GPU of this machine is not used, since it could not be measured; `moebatch profile` does"
)
_THREAD_BYTES = 2**20
"""Stack of a thread that computes, and what it gathers for products; 0.4 MB in measurements."""
_MEASURING_NEEDS_BYTES = 2 * 2**30
"""A job with less memory is planned with rough figures rather than put at risk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """A policy for a job and what it will do."""

    problem: Problem
    policy: Policy
    prediction: Prediction
    experts: ExpertChoice | None = None
    """What was chosen among predictors and caches, where that matters."""
    notes: tuple[str, ...] = ()

    def on(self, hardware: Hardware) -> "JobPlan":
        """The same policy with what it will do at other rates."""
        problem = replace(self.problem, hardware=hardware)
        return replace(self, problem=problem, prediction=predict(problem, self.policy))


def measured_machine(job: Job, files: ModelFiles, log: Callable[[str], None]) -> JobMachine:
    """The machine of a job that is about to run.

    Where this one has no profile, a few seconds of measuring tell enough, if experts have to be
    streamed and memory allows it; `log` gets a line before that.

    Raises ConfigError if a profile is missing or wrong, or has no GPU where one is needed.
    """
    return job_machine(job, lambda: _own_profile(job, files, log))


def _own_profile(job: Job, files: ModelFiles, log: Callable[[str], None]) -> NotedProfile:
    saved = load_saved()
    has_gpu = has_unmeasured_gpu(job, saved)
    if saved is not None and not has_gpu:
        return saved, ()
    if not (has_gpu or _worth_measuring(job, files)):
        return machine_profile()
    reason = "its profile lacks the GPU" if saved else "it has no profile yet"
    log(f"measuring this machine for some seconds, since {reason}")
    try:
        measured = measure_machine(
            job.output.path.parent,
            read=job.model.path,
            num_threads=num_threads(job),
            log=lambda line: None,
            sizes=quick_sizes(
                _possible_dtypes(job, files),
                tuple(stored for stored, _ in files.dtypes.stored.shares),
                files.shape.attention.cache_dtype,
            ),
        )
    except Exception as error:
        # Files of the model that are too short to be timed, nothing but noise, or others' GPU.
        if not (isinstance(error, ConfigError) or is_out_of_memory(error)):
            raise
        profile, notes = machine_profile()
        return profile, (*notes, *([_UNMEASURED_GPU] if has_gpu else []))
    note = f"this machine was measured for some seconds, since {reason}; `moebatch profile` "
    return measured, (f"{note}takes three minutes and is kept",)


def in_fastest_dtype(
    job: Job,
    files: ModelFiles,
    machine: JobMachine,
    log: Callable[[str], None],
    agreed: Callable[[Dtype], Dtype] = lambda fastest: fastest,
) -> ModelFiles:
    """What ``model.dtype: auto`` means on this machine, from its rates, or to all runs of the job:
    `agreed` gets what is fastest here."""
    if job.model.dtype == "auto":
        fastest, note = _fastest_dtype(files, machine)
        dtype = agreed(fastest)
        if dtype != fastest:
            note = f"computed in {dtype}, as in earlier runs of this job; {fastest} is faster here"
        if note:
            log(f"note: {note}")
        files = replace(files, dtype=COMPUTE_DTYPES[dtype])
    return files.read_as_computed if machine.kind == "cuda" else files


def _fastest_dtype(files: ModelFiles, machine: JobMachine) -> tuple[Dtype, str | None]:
    """With a note where it is not that of the checkpoint."""
    hardware, stored = machine.hardware(), files.dtypes.compute
    if machine.kind == "cuda":
        dtypes, notes = without_emulation(files.dtypes, hardware)
        return dtypes.compute, next(iter(notes), None)
    known = hardware.dram.processor.gemm if hardware.dram.processor else {}
    if machine.kind != "cpu" or not {"float32", stored} <= known.keys():
        return stored, None
    fastest = fastest_dtypes(files.shape, files.dtypes, hardware).compute
    if fastest == stored:
        return stored, None
    return fastest, f"computed in {fastest}, which is faster here than the model's {stored}"


def _possible_dtypes(job: Job, files: ModelFiles) -> tuple[Dtype, ...]:
    """In which the job may be computed: as it says, or as stored and wider."""
    stored = files.dtypes.compute
    wider: tuple[Dtype, ...] = ("float32",) if stored != "float32" else ()
    return (stored, *(wider if job.model.dtype == "auto" else ()))


def _worth_measuring(job: Job, files: ModelFiles) -> bool:
    """Whether experts stream, and measuring takes far less memory than the job may."""
    shape, budget = files.shape, dram_bytes(job)
    experts = len(shape.moe_layers) * shape.num_experts * files.dtypes.expert_bytes(shape)
    return budget >= _MEASURING_NEEDS_BYTES and experts > budget / 2


def job_problem(
    job: Job,
    files: ModelFiles,
    workload: Workload,
    hardware: Hardware,
    kind: DeviceKind = "cpu",
) -> Problem:
    """The problem within the job's budgets, counting from what the process holds now. Beginnings
    of prompts are shared in it only if a run of the model shares them.

    Raises DoesNotFit if an emulated GPU leaves no main memory, or the GPU has less than is asked.
    """
    kernels = loader.kernels()
    if not shares_beginnings(files, workload.max_total_tokens):
        workload = workload.unshared
    problem = Problem(
        shape=files.shape,
        dtypes=files.dtypes,
        hardware=hardware.without("vram") if kind == "cpu" else hardware,
        workload=workload,
        program_bytes=_program_bytes(kind, num_threads(job)),
        kv_beside_weights=fills_disk_of_model(job),
        stages=stages_pages(hardware, kind),
        # That of the kernels here, which another machine's profile does not know.
        instruction_set=kernels.instruction_set if kernels else "",
    ).as_cached
    for level, num_bytes in _budgets(job, problem.hardware, kind).items():
        problem = problem.with_capacity(level, num_bytes)
    return problem


def with_gpu_kernels(problem: Problem, kind: DeviceKind) -> Problem:
    """The problem of a run, which finds out whether kernels in Triton work on its GPU."""
    return replace(problem, has_gpu_kernels=gpu.prepare() is None if kind == "cuda" else None)


def _program_bytes(kind: DeviceKind, threads: int) -> Mapping[LevelName, int]:
    """What the process holds, its threads that compute included; with CUDA, what it will hold when
    the GPU is in use."""
    held = resident_bytes() + threads * _THREAD_BYTES
    if kind != "cuda":
        return {"dram": held}
    usual = PROGRAM_BYTES_WITH_GPU
    return {**usual, "dram": max(held, usual["dram"])}


def _budgets(job: Job, hardware: Hardware, kind: DeviceKind) -> dict[LevelName, int]:
    """What the job may take of each level. ``dram`` bounds the process, so an emulated GPU's
    memory comes out of it."""
    limits = job.resources
    budgets: dict[LevelName, int] = {"dram": dram_bytes(job)}
    require_within_levels(job, hardware, ["vram"])
    if hardware.vram is not None:
        budgets["vram"] = _vram_budget(limits.vram, hardware.vram.capacity_bytes, kind)
    if kind == "emulate":
        left = budgets["dram"] - budgets["vram"]
        if left <= 0:
            raise DoesNotFit(
                f"dram: the emulated GPU takes {format_bytes(budgets['vram'])} of it, there are "
                f"{format_bytes(budgets['dram'])}; lower resources.vram or raise resources.dram"
            )
        budgets["dram"] = min(left, hardware.dram.capacity_bytes)
    if hardware.disk is not None:
        spare = min(hardware.disk.capacity_bytes, disk_to_spare(job))
        budgets["disk"] = limits.disk or spare
    return budgets


def _vram_budget(asked: int | None, capacity_bytes: int, kind: DeviceKind) -> int:
    """What is asked for, or all that there is; of a real GPU no more than is free at this moment,
    since a desktop, or another job, holds some of it."""
    if kind != "cuda":
        return capacity_bytes if asked is None else asked
    free = torch.cuda.mem_get_info()[0] + CONTEXT_BYTES
    if asked is None:
        return min(capacity_bytes, free)
    if asked > free:
        too_many, there = format_unlike(asked, free)
        raise DoesNotFit(
            f"vram: {too_many} are asked for by resources.vram, and {there} of the GPU are free; "
            "lower it, or end what else uses the GPU"
        )
    return asked


def plan_job(
    problem: Problem,
    given: PolicyFile | None = None,
    *,
    schedule: str | None = None,
    is_plain: bool = False,
    is_static: bool = False,
    wishes: Wishes | None = None,
) -> JobPlan:
    """The policy that a file gives, or the best one; with another schedule, if one is given, and
    with static batches, if they are asked for.

    Args:
        wishes: what the job says of its experts; the planner chooses the rest.
        is_plain: everything is done one after the other, so only main memory has keys and values,
            and the same experts stay there, whatever the policy and the wishes say.

    Raises DoesNotFit, and ConfigError for a policy that cannot be run.
    """
    asked, wishes, experts = replace(problem, schedule=schedule), wishes or Wishes(), None
    if given is None:
        found = best_for(asked, wishes, is_plain=is_plain)
        policy, experts = found.policy, found.experts
    else:
        policy = _given(asked, given, wishes, is_plain=is_plain)
    if is_static:
        policy = replace(policy, batching="static")
    if is_plain:
        policy = replace(policy, cache="static", cache_sizes=())
    return JobPlan(
        problem=problem,
        policy=policy,
        prediction=predict(problem, policy),
        experts=experts,
        notes=slot_notes(problem, policy),
    )


def _given(problem: Problem, given: PolicyFile, wishes: Wishes, *, is_plain: bool) -> Policy:
    """The policy of the file, with the problem's schedule if it has one, and then with fewer
    experts where they are computed if that needs the room."""
    require_schedule(problem)
    policy = given.policy.resolve(problem.workload, num_experts=problem.num_experts)
    predictor = wishes.predictor or policy.predictor
    policy = with_room(problem, replace(policy, predictor=predictor, staging=False))
    if problem.schedule is not None:
        policy = policy_for(policy, problem.schedule, problem)
    require_none(not_runnable(problem, policy, is_plain=is_plain), source=given.path)
    excess = too_small(problem, policy)
    if problem.schedule is None:
        excess = excess or too_large(problem, policy)
    if excess is not None:
        raise DoesNotFit(f"{given.path}: {excess}")
    return policy if problem.schedule is None else fitted(problem, policy)
