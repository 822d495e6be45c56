"""Where a run is, and what came of it, in figures."""

import time
from collections.abc import Sequence
from dataclasses import fields, replace

from moebatch.engine.statistics import EngineStatistics
from moebatch.job.attempt import Attempt
from moebatch.job.limits import dram_bytes
from moebatch.job.notices import describe_emulation
from moebatch.job.planning import JobPlan
from moebatch.job.status import GatingUse, RunStatus, RunSummary, lane_times, shown_waits, waited_s
from moebatch.model.native import loader
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.simulation.world import SimWorld
from moebatch.schedule.drivers.simulate import simulate
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.workload import Workload
from moebatch.store.memory import peak_resident_bytes, resident_bytes
from moebatch.units import format_flops, format_rate

_LEAST_READING_S = 1.0
"""Less reading says nothing about the disk."""


def status_of(attempt: Attempt) -> RunStatus:
    """Of a run that is in the middle of it; asked from another thread."""
    built, counted, answering = attempt.built, attempt.input, attempt.answering
    workload = counted.workload if counted else None
    expected = (workload.num_sequences or 0) * workload.mean_new_tokens if workload else 0
    foresight = built.foresight if built else None
    elapsed_s = attempt.elapsed_s
    return RunStatus(
        phase=attempt.phase,
        num_rows=counted.num_rows if counted else 0,
        num_done=attempt.num_done,
        num_ended=answering.num_ended if answering else 0,
        errors=dict(answering.errors) if answering else {},
        num_cut_off=answering.num_cut_off if answering else 0,
        num_cut_thinking=answering.num_cut_thinking if answering else 0,
        engine=replace(built.engine.statistics) if built else EngineStatistics(),
        expected_tokens=round(expected),
        elapsed_s=elapsed_s,
        eta_s=attempt.eta_s(),
        memory_bytes=resident_bytes(),
        budget_bytes=dram_bytes(attempt.context.job),
        lanes=lane_times(built, elapsed_s) if built else (),
        is_emulated=attempt.kind == "emulate",
        foresight=foresight.layers if foresight and foresight.has_news else {},
    )


def summary_of(attempt: Attempt, begun_s: float, given_up: Sequence[int]) -> RunSummary:
    """Of a run that is over; it began at `begun_s` of `time.perf_counter`. `given_up` are rows that
    had been done when attempts before this one began."""
    now, context = status_of(attempt), attempt.context
    built, plan = attempt.built, attempt.plan
    answers = _early_answers(attempt, plan.problem.workload) if plan else None
    if given_up:
        now = replace(now, num_ended=now.num_rows - given_up[0])
    return RunSummary(
        **{each.name: getattr(now, each.name) for each in fields(now)},
        num_begun_again=len(given_up),
        output=str(context.job.output.path),
        of_failed=str(context.job.output.of_failed),
        shard=context.shard,
        load_s=(attempt.first_pass_s or begun_s) - begun_s,
        total_s=time.perf_counter() - begun_s,
        waited_s=waited_s(built) if built else {},
        bytes_read=built.reads.num_bytes if built else 0,
        num_copied=attempt.repeats.num_copied,
        peak_bytes=peak_resident_bytes(),
        policy=plan.policy if plan else None,
        prediction=plan.prediction if plan else None,
        hindsight=_hindsight(attempt, plan, answers) if plan else None,
        disk_rate=_disk_rate(attempt),
        mean_answer_tokens=answers.mean_new_tokens if answers else None,
        reads_past_page_cache=built.reads.is_direct if built else True,
        gating=_gating(attempt),
        emulated=describe_emulation(plan.problem.hardware) if plan and now.is_emulated else None,
        vram_peak_bytes=built.vram_peak_bytes if built else None,
        waits=shown_waits(built.recorder.statistics) if built and built.recorder else None,
        torch_only=attempt.torch_only,
        products=_products(plan) if plan and attempt.kind == "cpu" else "",
    )


def run_timelines(attempt: Attempt) -> dict[str, Timeline]:
    """The first passes of a run by name, as measured and as predicted. The simulated passes are
    those that were run, token for token, and where the schedule asks gates, so is their routing.
    Empty if nothing was traced."""
    built, plan = attempt.built, attempt.plan
    if built is None or plan is None or built.recorder is None or built.log is None:
        return {}
    measured = built.recorder.timeline
    num_passes = len(measured.pass_ends_s)
    if not num_passes:
        return {}
    passes = built.log.passes[:num_passes]
    world = SimWorld(plan.problem, plan.policy, passes=passes, routing=built.log)
    schedule = plan.policy.schedule
    predicted = simulate(schedule, world.setup, world.room, world, num_passes=num_passes)
    return {"predicted": predicted, "measured": measured}


def _products(plan: JobPlan) -> str:
    prices, kernels = plan.problem.prices, loader.kernels()
    dtypes, cpu = prices.dtypes, prices.cpu
    used = f"{kernels.instruction_set} kernels" if kernels else "torch"
    peak = f"up to {format_flops(cpu.gemm_for(dtypes.compute).peak)}"
    said = f"{dtypes.compute} by {used}, {peak}"
    if dtypes.converts:
        rates = (
            f"{stored} at {format_rate(cpu.decoding_rate(stored))}"
            for stored, _ in dtypes.stored.shares
        )
        said = f"{said}, experts decoded from {' and '.join(rates)}"
    return f"{said} as the profile says"


def _hindsight(attempt: Attempt, plan: JobPlan, answers: Workload | None) -> Prediction | None:
    """The prediction at the rate at which the disk has been read, for answers as long as they
    were."""
    problem = plan.problem
    if answers is not None:
        problem = replace(problem, workload=answers)
    rate = _disk_rate(attempt)
    if rate is not None and problem.has_disk:
        problem = problem.with_link_rate("disk->dram", rate)
    return None if problem is plan.problem else predict(problem, plan.policy)


def _disk_rate(attempt: Attempt) -> float | None:
    """Bytes per second at which experts were read; None where too few were to tell."""
    reads = attempt.built.reads if attempt.built else None
    if reads is None or reads.busy.total_s < _LEAST_READING_S:
        return None
    return reads.num_bytes / reads.busy.total_s


def _early_answers(attempt: Attempt, planned: Workload) -> Workload | None:
    """The work as it turned out; None where all answers were as long as they might be."""
    answers = attempt.answers
    if not answers.num_sequences or answers.mean_new_tokens >= planned.mean_new_tokens:
        return None
    shared = round(planned.mean_shared_tokens)
    return replace(
        planned,
        num_sequences=answers.num_sequences,
        mean_new_tokens=answers.mean_new_tokens,
        max_new_tokens=answers.max_new_tokens,
        lengths=tuple(
            length._replace(shared_tokens=min(shared, length.prompt_tokens - 1))
            for length in answers.kept
        ),
    )


def _gating(attempt: Attempt) -> GatingUse | None:
    if attempt.context.approximation.gating_name == "exact":
        return None
    count = attempt.built.gating_count if attempt.built else None
    return GatingUse(
        how=attempt.context.approximation.gating_text,
        single_share=count.single_share if count else None,
        mean_experts=count.mean_experts if count else None,
    )
