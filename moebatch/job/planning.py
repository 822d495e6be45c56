"""A job as a planning problem: its model, its rows, and what it may take of a machine."""

from collections.abc import Callable
from dataclasses import dataclass

from moebatch.engine.model_files import ModelFiles
from moebatch.errors import ConfigError, DoesNotFit, Fault
from moebatch.measure.machine import measure_machine
from moebatch.measure.saved import load_saved, machine_profile
from moebatch.plan.machine import detect_machine
from moebatch.plan.planner import best_policy
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.problem import Problem
from moebatch.plan.refusal import too_large, too_small
from moebatch.spec.hardware import Hardware
from moebatch.spec.job import Job
from moebatch.spec.policy import Policy
from moebatch.spec.policy_file import PolicyFile
from moebatch.spec.profile import HardwareProfile, load_profile
from moebatch.spec.workload import Workload
from moebatch.store.memory import resident_bytes

MEASURED_IN_SECONDS = (
    "this machine has no profile; it was measured for some seconds, `moebatch profile` takes a "
    "minute and is kept"
)
_MEASURING_NEEDS_BYTES = 2 * 2**30
"""A job with less memory is planned with rough figures rather than put at risk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """A policy for a job and what it will do."""

    problem: Problem
    policy: Policy
    prediction: Prediction


def job_profile(
    job: Job, files: ModelFiles, tell: Callable[[str], None]
) -> tuple[HardwareProfile, tuple[str, ...]]:
    """Figures of the machine that the job names, or of this one, and what to know about them.

    Where this one has no profile, a few seconds of measuring tell enough, if experts have to be
    streamed and memory allows it; `tell` gets a line before that.

    Raises ConfigError if the file is missing or wrong.
    """
    profile, notes = _profile(job, files, tell)
    if "vram" in profile.levels:
        unused = f"runs are computed in main memory; the GPU of {profile.name} is not used"
        notes = (*notes, unused)
    return profile, notes


def _profile(
    job: Job, files: ModelFiles, tell: Callable[[str], None]
) -> tuple[HardwareProfile, tuple[str, ...]]:
    if job.resources.hardware != "auto":
        return load_profile(job.resources.hardware), ()
    saved = load_saved()
    if saved is not None:
        return saved, ()
    if not _worth_measuring(job, files):
        return machine_profile()
    tell("measuring this machine for some seconds, since it has no profile yet")
    num_threads = job.resources.threads or detect_machine().num_cores
    try:
        measured = measure_machine(
            job.output.path.parent,
            read=job.model.path,
            num_threads=num_threads,
            tell=lambda line: None,
            quick=True,
            dtype=files.dtypes.compute,
        )
    except ConfigError:  # files of the model that are too short to be timed
        return machine_profile()
    return measured, (MEASURED_IN_SECONDS,)


def _worth_measuring(job: Job, files: ModelFiles) -> bool:
    """Whether experts stream, and measuring takes far less memory than the job may."""
    shape, budget = files.shape, job.resources.dram or detect_machine().dram_bytes
    experts = len(shape.moe_layers) * shape.num_experts * files.dtypes.expert_bytes(shape)
    return budget >= _MEASURING_NEEDS_BYTES and experts > budget / 2


def job_problem(job: Job, files: ModelFiles, workload: Workload, hardware: Hardware) -> Problem:
    """The problem within the job's budgets, counting from what the process holds now.

    Passes are computed in main memory, so levels of a GPU are left out, and so is the disk for
    keys and values.
    """
    return Problem(
        shape=files.shape,
        dtypes=files.dtypes,
        hardware=hardware.without("vram"),
        workload=workload,
        program_bytes={"dram": resident_bytes()},
        kv_on_disk=False,
    ).with_capacity("dram", job.resources.dram or detect_machine().dram_bytes)


def plan_job(problem: Problem, given: PolicyFile | None = None) -> JobPlan:
    """The policy that a file gives, or the best one.

    Raises DoesNotFit, and ConfigError for a policy that cannot be run.
    """
    policy = best_policy(problem).policy if given is None else _given(problem, given)
    return JobPlan(problem=problem, policy=policy, prediction=predict(problem, policy))


def _given(problem: Problem, given: PolicyFile) -> Policy:
    policy = given.resolve(problem.workload, num_experts=problem.num_experts)
    faults = [
        Fault(file=given.path, where=f"policy.{where}", message=message)
        for where, message in _not_runnable(policy)
    ]
    if faults:
        raise ConfigError(faults)
    excess = too_small(problem, policy) or too_large(problem, policy)
    if excess is not None:
        raise DoesNotFit(f"{given.path}: {excess}")
    return policy


def _not_runnable(policy: Policy) -> list[tuple[str, str]]:
    """What a policy asks for that passes in main memory cannot do."""
    found = []
    if policy.attention_on_gpu:
        found.append(("attention_on_gpu", "runs are computed in main memory; set it to false"))
    if policy.ffn_on_gpu:
        found.append(("ffn_on_gpu", "runs are computed in main memory; set it to false"))
    for name in ("weights", "kv_cache"):
        placement = getattr(policy, name)
        if placement.vram:
            found.append((f"{name}.vram", "runs are computed in main memory; set it to 0"))
    if policy.kv_cache.disk:
        found.append(("kv_cache.disk", "keys and values stay in main memory; set it to 0"))
    if policy.batching != "mixed":
        found.append(("batching", "a run refills places as they come free; write mixed"))
    if policy.schedule != "klotski":
        found.append(("schedule", "a run computes expert by expert; write klotski"))
    if policy.num_slots == 0 and policy.weights.disk:
        found.append(("num_slots", "experts on disk need slots to stream through"))
    return found
