"""The answer of MoE-Lightning's own planner, in the words of ours."""

from math import ceil

from moebatch.layout.lanes import bottleneck
from moebatch.plan.answer import Answer
from moebatch.plan.papers.paper import PaperModel
from moebatch.plan.papers.paper_plan import PaperPlan
from moebatch.plan.papers.paper_policy import PaperPolicy
from moebatch.plan.papers.paper_problem import PaperProblem
from moebatch.plan.papers.paper_search import PaperSearch
from moebatch.plan.prediction import Prediction
from moebatch.plan.problem import Problem
from moebatch.spec.policy import Placement, Policy, pages_of

_NOTES = ("MoE-Lightning's own forms and constants: decode steps count attention and experts only",)


def answer_paper(problem: Problem, model: str) -> Answer:
    """The policy of the highest decode throughput by MoE-Lightning's forms.

    Raises DoesNotFit, and ConfigError for machines without a GPU.
    """
    workload = problem.workload
    asked = PaperProblem(
        shape=problem.shape,
        hardware=problem.hardware,
        prompt_tokens=workload.mean_prompt_tokens,
        gen_tokens=workload.mean_new_tokens,
    )
    found = PaperSearch(model=PaperModel(problem=asked)).solve()
    return Answer(
        problem=problem,
        model=model,
        method="paper",
        solver="closed form for every batch of the authors' grid",
        policy=_policy(problem, found.policy),
        prediction=_prediction(problem, found),
        notes=_NOTES,
    )


def _policy(problem: Problem, found: PaperPolicy) -> Policy:
    streamed = (1 - found.r_w) * problem.shape.num_experts
    return Policy(
        batch_size=found.batch_size,
        micro_batch_size=found.micro_batch_size,
        tokens_per_pass=found.batch_size,
        num_slots=ceil(2 * streamed),  # the weights of two layers, as far as they are not resident
        num_kv_pages=found.batch_size * pages_of(problem.workload.max_total_tokens),
        weights=Placement(vram=found.r_w, dram=1 - found.r_w),
        kv_cache=Placement(vram=found.r_c, dram=1 - found.r_c),
        attention_on_gpu=found.attention_on_gpu,
        ffn_on_gpu=found.ffn_on_gpu,
        schedule="flexgen" if found.attention_on_gpu else "cgopipe",
        batching="static",
    )


def _prediction(problem: Problem, found: PaperPlan) -> Prediction:
    workload, batch = problem.workload, found.policy.batch_size
    lanes = {"gpu": found.gpu_s, "cpu": found.cpu_s, "dram->vram": found.comm_s}
    steps = workload.mean_new_tokens - 1
    batches = None if workload.num_sequences is None else ceil(workload.num_sequences / batch)
    batch_s = found.prefill_s + found.decode_s
    count, generated = batches or 1, (workload.num_sequences or 0) * workload.mean_new_tokens
    return Prediction(
        # The last batch takes as long as any, however few sequences are left for it.
        tokens_per_s=generated / (batches * batch_s) if batches else found.tokens_per_s,
        decode_tokens_per_s=found.decode_tokens_per_s,
        prefill_tokens_per_s=batch * workload.mean_prompt_tokens / found.prefill_s,
        layer_time_s=found.layer_s,
        lanes_s=lanes,
        bottleneck=bottleneck(lanes),
        peak_bytes={
            "vram": ceil(found.gpu_memory.total_bytes),
            "dram": ceil(found.cpu_memory.total_bytes),
        },
        capacity_bytes={
            "vram": int(found.gpu_memory.limit_bytes),
            "dram": int(found.cpu_memory.limit_bytes),
        },
        busy_s={
            lane: seconds * steps * problem.shape.num_layers * count
            for lane, seconds in lanes.items()
        },
        num_passes=None if batches is None else batches * (steps + 1),
        job_time_s=None if batches is None else batches * batch_s,
    )
