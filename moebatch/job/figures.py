"""Where a run is, and what came of it, in figures."""

import time
from dataclasses import replace

from moebatch.engine.approximation import EXACT
from moebatch.folder.shard import Shard
from moebatch.job.attempt import Attempt
from moebatch.job.lane_times import lane_times, shown_waits, waited_s
from moebatch.job.notices import describe_emulation
from moebatch.job.planning import JobPlan
from moebatch.job.status import GatingUse, RunStatus, RunSummary
from moebatch.model.native import loader
from moebatch.plan.prediction import Prediction, predict
from moebatch.spec.workload import Workload
from moebatch.store.memory import peak_resident_bytes, resident_bytes
from moebatch.units import format_flops

_LEAST_READING_S = 1.0
"""Less reading says nothing about the disk."""


def status_of(attempt: Attempt | None, *, run_folder: str, budget_bytes: int) -> RunStatus:
    """Of a run that is in the middle of it; asked from another thread. None before it has begun to
    look at rows."""
    built = attempt.built if attempt else None
    counted = attempt.input if attempt else None
    answering = attempt.answering if attempt else None
    elapsed_s = attempt.elapsed_s if attempt else 0.0
    engine = built.engine.statistics if built else None
    workload = counted.workload if counted else None
    expected = (workload.num_sequences or 0) * workload.mean_new_tokens if workload else 0
    return RunStatus(
        phase=attempt.phase if attempt else "checking input",
        run_folder=run_folder,
        num_rows=counted.num_rows if counted else 0,
        num_done=attempt.num_done if attempt else 0,
        num_failed=answering.errors.total() if answering else 0,
        num_ended=answering.num_ended if answering else 0,
        num_running=engine.num_running if engine else 0,
        num_passes=engine.num_passes if engine else 0,
        layer=engine.layer if engine else 0,
        num_layers=engine.num_layers if engine else 0,
        prompt_tokens=engine.prompt_tokens if engine else 0,
        generated_tokens=engine.generated_tokens if engine else 0,
        expected_tokens=round(expected),
        elapsed_s=elapsed_s,
        eta_s=attempt.eta_s() if attempt else None,
        memory_bytes=resident_bytes(),
        budget_bytes=budget_bytes,
        lanes=lane_times(built, elapsed_s) if built else (),
        is_emulated=attempt is not None and attempt.kind == "emulate",
        foresight=built.foresight.layers if built and built.foresight.has_news else {},
    )


def summary_of(
    attempt: Attempt, *, output: str, shard: Shard, budget_bytes: int, begun_s: float
) -> RunSummary:
    """Of a run that is over; it began at `begun_s` of `time.perf_counter`."""
    now = status_of(attempt, run_folder="", budget_bytes=budget_bytes)
    built, plan = attempt.built, attempt.plan
    engine = built.engine.statistics if built else None
    answers = _early_answers(attempt, plan.problem.workload) if plan else None
    return RunSummary(
        output=output,
        shard=shard,
        num_ended=now.num_ended,
        num_rows=now.num_rows,
        num_failed=now.num_failed,
        errors=dict(attempt.answering.errors) if attempt.answering else {},
        prompt_tokens=now.prompt_tokens,
        generated_tokens=now.generated_tokens,
        load_s=(attempt.first_pass_s or begun_s) - begun_s,
        run_s=now.elapsed_s,
        total_s=time.perf_counter() - begun_s,
        lanes=now.lanes,
        waited_s=waited_s(built) if built else 0.0,
        bytes_read=built.reads.num_bytes if built else 0,
        num_passes=engine.num_passes if engine else 0,
        num_preempted=engine.num_preempted if engine else 0,
        num_copied=attempt.repeats.num_copied,
        shared_tokens=engine.shared_tokens if engine else 0,
        num_shrunk=engine.num_shrunk if engine else 0,
        num_grown=engine.num_grown if engine else 0,
        peak_bytes=peak_resident_bytes(),
        budget_bytes=budget_bytes,
        policy=plan.policy if plan else None,
        prediction=plan.prediction if plan else None,
        hindsight=_hindsight(attempt, plan) if plan else None,
        disk_rate=_disk_rate(attempt),
        mean_answer_tokens=answers.mean_new_tokens if answers else None,
        reads_past_page_cache=built.reads.is_direct if built else True,
        gating=_gating(attempt),
        emulated=_emulated(attempt),
        vram_peak_bytes=built.vram_peak_bytes if built else None,
        waits=shown_waits(built.recorder.statistics) if built and built.recorder else None,
        foresight=now.foresight,
        torch_only=attempt.torch_only,
        products=_products(plan) if plan and attempt.kind == "cpu" else "",
    )


def _products(plan: JobPlan) -> str:
    prices, kernels = plan.problem.prices, loader.kernels()
    peak = prices.cpu.gemm_for(prices.dtypes.compute).peak
    used = f"{kernels.instruction_set} kernels" if kernels else "torch"
    return f"{prices.dtypes.compute} by {used}, up to {format_flops(peak)} as the profile says"


def _hindsight(attempt: Attempt, plan: JobPlan) -> Prediction | None:
    """The prediction at the rate at which the disk has been read, for answers as long as they
    were."""
    problem = plan.problem
    answers = _early_answers(attempt, problem.workload)
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
            for length in answers.lengths.kept
        ),
    )


def _gating(attempt: Attempt) -> GatingUse | None:
    if attempt.approximation == EXACT:
        return None
    count = attempt.built.gating_count if attempt.built else None
    return GatingUse(
        how=str(attempt.approximation),
        single_share=count.single_share if count else None,
        mean_experts=count.mean_experts if count else None,
    )


def _emulated(attempt: Attempt) -> str | None:
    if attempt.plan is None or attempt.kind != "emulate":
        return None
    return describe_emulation(attempt.plan.problem.hardware)
