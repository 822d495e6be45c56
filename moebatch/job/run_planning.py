"""How a run computes, found out when its rows are known."""

from dataclasses import replace

from moebatch.engine.spec import has_common_keys
from moebatch.job.ground import Ground
from moebatch.job.hints import Hints
from moebatch.job.machine import JobMachine, sharing_cores
from moebatch.job.notices import (
    describe_experts,
    describe_prediction,
    gating_without_effect,
    settings_without_effect,
)
from moebatch.job.planning import JobPlan, job_problem, plan_job
from moebatch.plan.expert_choice import Wishes
from moebatch.predict.predictor import Predictor
from moebatch.schedule.pregated import pregated
from moebatch.spec.job import Job
from moebatch.spec.policy import Policy
from moebatch.spec.workload import Workload


class RunPlanning:
    """Plans rows on a machine, and says so."""

    def __init__(self, job: Job, ground: Ground, hints: Hints, machine: JobMachine) -> None:
        """Raises ConfigError if another kind of device was insisted on."""
        ground.options.require_device(machine.kind)  # a GPU may have been found only now
        self.predictor: Predictor | None = None
        """What the plan asks for."""
        self._job = job
        self._ground = ground
        self._hints = hints
        self._machine = machine

    def plan(self, workload: Workload) -> JobPlan:
        """A plan, with what its predictor holds."""
        options, tell = self._ground.options, self._ground.tell
        unused = settings_without_effect(self._job, self._machine.kind)
        for warning in (*self._ground.files.warnings, *unused):
            tell(f"warning: {warning}")
        if not has_common_keys(self._ground.files):
            workload = workload.unshared
        hints = self._hints
        plan = self._plan(workload, hints.wishes)
        name = "none" if options.is_plain else hints.resolved(plan.policy.predictor)
        self.predictor, experts = hints.predictor(name), plan.experts
        if self.predictor is not None:  # what it holds counts now
            plan = self._plan(workload, replace(hints.wishes, predictor=name))
        share = self.num_threads(plan.policy) / self._ground.num_threads
        if share < 1:
            plan = plan.on(sharing_cores(plan.problem.hardware, share))
        for warning in gating_without_effect(self._ground.approximation, plan.policy.schedule):
            tell(f"warning: {warning}")
        for note in (*self._machine.notes, *plan.notes):
            tell(f"note: {note}")
        tell(f"policy: {plan.policy}")
        if experts is not None:
            tell(f"experts: {describe_experts(experts)}")
        is_emulated = self._machine.kind == "emulate"
        how = " on the emulated GPU, computed by the CPU" if is_emulated else ""
        tell(f"expected{how}: {describe_prediction(plan.prediction)}")
        return plan

    def num_threads(self, policy: Policy) -> int:
        """Threads of one lane. Where the CPU stands in for a GPU and attends beside it, two lanes
        compute at a time."""
        if self._machine.kind == "emulate" and not policy.attention_on_gpu:
            return max(1, self._ground.num_threads // 2)
        return self._ground.num_threads

    def _plan(self, workload: Workload, wishes: Wishes) -> JobPlan:
        options, machine = self._ground.options, self._machine
        problem = job_problem(
            self._job, self._ground.files, workload, machine.hardware(), machine.kind
        )
        return plan_job(
            replace(problem, kv_on_disk=not options.is_plain, habits=self._hints.habits),
            options.policy,
            schedule=self._schedule(),
            is_plain=options.is_plain,
            is_static=options.is_static,
            wishes=wishes,
        )

    def _schedule(self) -> str | None:
        """The one that is asked for; of planned policies, that which pre-gates have been made for
        where there are any; None is the policy's own."""
        options = self._ground.options
        is_free = options.schedule is None and options.policy is None
        if is_free and self._ground.approximation.activation_level:
            return pregated.name
        return options.schedule
