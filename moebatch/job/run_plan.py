"""How a run computes, found out when its rows are known."""

from dataclasses import dataclass, replace

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.spec import shares_beginnings
from moebatch.job.context import RunContext
from moebatch.job.limits import num_threads
from moebatch.job.machine import JobMachine
from moebatch.job.notices import describe_experts, describe_prediction, without_effect
from moebatch.job.planning import JobPlan, job_problem, plan_job, with_gpu_kernels
from moebatch.plan.expert_choice import Wishes
from moebatch.predict.predictor import Predictor
from moebatch.spec.workload import Workload

_NOT_SHARED = (
    "prompts begin alike, and each computes its beginning: what this model keeps of one is written "
    "over, or depends on the length of the prompt"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A plan with what it computes by."""

    plan: JobPlan
    predictor: Predictor | None
    num_threads: int
    """Of one lane."""


def plan_run(
    context: RunContext, files: ModelFiles, machine: JobMachine, workload: Workload
) -> RunPlan:
    """Plans rows on a machine, and logs how. Raises ConfigError if another kind of device was
    insisted on, and what `plan_job` raises."""
    options, log, hints = context.options, context.log, context.opened.hints
    options.require_device(machine.kind)  # a GPU may have been found only now
    if workload.mean_shared_tokens and not shares_beginnings(files, workload.max_total_tokens):
        log(f"note: {_NOT_SHARED}")
    plan = _planned(context, files, machine, workload, hints.wishes)
    name = "none" if options.is_plain else hints.resolved(plan.policy.predictor)
    predictor, experts = hints.predictor(name), plan.experts
    if predictor is not None:  # what it holds counts now
        wishes = replace(hints.wishes, predictor=name)
        plan = _planned(context, files, machine, workload, wishes)
    threads = most = num_threads(context.job)
    if machine.kind == "emulate" and not plan.policy.attention_on_gpu:
        threads = max(1, most // 2)  # the CPU stands in for a GPU and attends beside it
        share = threads / most
        hardware = plan.problem.hardware.with_processors(lambda own: own.scaled(share))
        plan = plan.on(hardware)
    unused = without_effect(context.job, machine.kind, context.approximation, plan.policy)
    for warning in (*files.warnings, *unused):
        log(f"warning: {warning}")
    for note in (*machine.notes, *plan.notes):
        log(f"note: {note}")
    log(f"policy: {plan.policy}")
    if experts is not None:
        log(f"experts: {describe_experts(experts)}")
    how = " on the emulated GPU, computed by the CPU" if machine.kind == "emulate" else ""
    log(f"expected{how}: {describe_prediction(plan.prediction)}")
    return RunPlan(plan=plan, predictor=predictor, num_threads=threads)


def _planned(
    context: RunContext,
    files: ModelFiles,
    machine: JobMachine,
    workload: Workload,
    wishes: Wishes,
) -> JobPlan:
    options = context.options
    problem = job_problem(context.job, files, workload, machine.hardware(), machine.kind)
    problem = with_gpu_kernels(problem, machine.kind)
    has_policy = options.policy is not None
    return plan_job(
        replace(problem, kv_on_disk=not options.is_plain, habits=context.opened.hints.habits),
        options.policy,
        schedule=context.opened.schedule(options.schedule, has_policy=has_policy),
        is_plain=options.is_plain,
        is_static=options.is_static,
        wishes=wishes,
    )
