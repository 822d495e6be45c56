"""A job as a planning problem: its model, its rows, and what it may take of a machine."""

from dataclasses import dataclass

from moebatch.engine.build import ModelFiles
from moebatch.errors import ConfigError, DoesNotFit, Fault
from moebatch.measure.saved import machine_profile
from moebatch.plan.machine import detect_machine
from moebatch.plan.planner import best_policy
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.problem import Problem
from moebatch.plan.refusal import too_large
from moebatch.spec.hardware import Hardware
from moebatch.spec.job import Job
from moebatch.spec.policy import Policy
from moebatch.spec.policy_file import PolicyFile
from moebatch.spec.profile import HardwareProfile, load_profile
from moebatch.spec.workload import Workload
from moebatch.store.memory import resident_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """A policy for a job and what it will do."""

    problem: Problem
    policy: Policy
    prediction: Prediction


def job_profile(job: Job) -> tuple[HardwareProfile, tuple[str, ...]]:
    """Figures of the machine that the job names, or of this one as far as they are known, and
    what to know about them.

    Raises ConfigError if the file is missing or wrong.
    """
    if job.resources.hardware != "auto":
        return load_profile(job.resources.hardware), ()
    return machine_profile()


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
    excess = too_large(problem, policy)
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
