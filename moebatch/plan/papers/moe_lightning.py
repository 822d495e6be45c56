"""MoE-Lightning's own planner, what ``moebatch plan --paper`` goes by.

The authors solve a small linear program for each micro-batch size and number of micro-batches. With
their forms (`lightning_model.py`, which has the letters) it has a closed solution, so there is no
solver here.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from math import ceil

from moebatch.errors import DoesNotFit
from moebatch.layout.lanes import bottleneck
from moebatch.plan.answer import Answer
from moebatch.plan.papers.lightning_model import PaperModel, PaperPlan, PaperPolicy
from moebatch.plan.prediction import Prediction
from moebatch.plan.problem import Problem
from moebatch.schedule.lanes import CPU, GPU
from moebatch.spec.policy.policy import MAX_SEQUENCES, Placement, Policy
from moebatch.units import format_bytes

Setting = tuple[bool, bool]
"""(A_g, F_g)."""
MAIN_SETTING: Setting = (False, True)
"""Attention on the CPU, experts on the GPU: the paper's main setting."""
SETTINGS: tuple[Setting, ...] = (MAIN_SETTING, (True, True), (False, False), (True, False))
TIE = 1e-6
"""Policies whose throughput is within this of the best, relatively, are equally good; the smallest
batch is taken. Once the GPU binds, throughput does not change with the number of micro-batches."""
_NO_GAIN = 1e-9


def micro_batch_grid() -> Iterator[int]:
    """Micro-batch sizes that the authors search, without end: 1, 2, 3, 4, 36, 68, 100, ..."""
    yield from (1, 2, 3)
    yield from count(4, 32)


def _spread(sizes: Sequence[int]) -> Sequence[int]:
    """A few from the whole range."""
    few = {len(sizes) - 1 >> power for power in range(len(sizes).bit_length())}
    return [sizes[index] for index in sorted(few)]


def _is_better(plan: PaperPlan, best: PaperPlan) -> bool:
    """Whether it takes less time, or as much in a smaller batch."""
    gains = plan.sequence_layer_s < best.sequence_layer_s * (1 - _NO_GAIN)
    is_equal = plan.sequence_layer_s <= best.sequence_layer_s * (1 + _NO_GAIN)
    return gains or (is_equal and plan.policy.batch_size < best.policy.batch_size)


def _all_below(mu: int, num_micro_batches: int, setting: Setting) -> PaperPolicy:
    """No weights on the GPU, and its cache there if it attends: it counts all of that anyway."""
    attention_on_gpu, ffn_on_gpu = setting
    return PaperPolicy(
        micro_batch_size=mu,
        num_micro_batches=num_micro_batches,
        attention_on_gpu=attention_on_gpu,
        ffn_on_gpu=ffn_on_gpu,
        r_w=0.0,
        r_c=float(attention_on_gpu),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperSearch:
    """Finds the policy of the highest decode throughput."""

    model: PaperModel
    settings: tuple[Setting, ...] = SETTINGS

    def solve(self) -> PaperPlan:
        """The best plan, of equal ones (TIE) that of the smallest batch.

        Raises DoesNotFit if there is none.
        """
        plans = list(self.candidates())
        if not plans:
            raise DoesNotFit(self._too_small())
        best = min(plan.sequence_layer_s for plan in plans)
        equals = (plan for plan in plans if plan.sequence_layer_s <= best * (1 + TIE))
        return min(equals, key=lambda plan: plan.policy.batch_size)

    def candidates(self) -> Iterator[PaperPlan]:
        """The best plan of every micro-batch size of the authors' grid, for each setting, but for
        sizes that cannot be the answer."""
        recurs = self.model.shape.recurrence is not None
        best: PaperPlan | None = None
        for attention_on_gpu, ffn_on_gpu in self.settings:
            if recurs and ffn_on_gpu and not attention_on_gpu:
                continue  # as no run does it
            setting = attention_on_gpu, ffn_on_gpu
            sizes = self._sizes_that_fit(setting)
            for some in (_spread(sizes), sizes):  # by a few most others are beaten
                for mu in self._promising(some, setting, best):
                    plan = self._best_of(mu, setting)
                    yield plan
                    if best is None or _is_better(plan, best):
                        best = plan

    def _sizes_that_fit(self, setting: Setting) -> Sequence[int]:
        """Sizes of micro-batches of which one fits; where one does not, nor do larger ones."""
        sizes = [*takewhile(lambda mu: mu <= MAX_SEQUENCES, micro_batch_grid())]
        return sizes[
            : bisect_left(sizes, True, key=lambda mu: not self.best_shares(mu, 1, setting))
        ]

    def _promising(
        self, sizes: Sequence[int], setting: Setting, best: PaperPlan | None
    ) -> Iterator[int]:
        """Sizes but for those that compute for longer than `best` takes, whatever they wait for, or
        for as long in no smaller batch. The larger, the less long for each sequence."""
        if best is None:
            yield from sizes
            return
        enough_s = best.sequence_layer_s
        is_enough = partial(self._computes_in, enough_s * (1 + TIE), setting)
        gains = partial(self._computes_in, enough_s * (1 - _NO_GAIN), setting)
        for mu in sizes[bisect_left(sizes, True, key=is_enough) :]:
            if mu < best.policy.batch_size or gains(mu):
                yield mu

    def _computes_in(self, enough_s: float, setting: Setting, mu: int) -> bool:
        """Whether micro-batches of this size are computed in less for each sequence."""
        busy_s = self.model.busy_s(_all_below(mu, 1, setting))
        return max(busy_s[GPU.name], busy_s[CPU.name]) < mu * enough_s

    def best_shares(
        self, micro_batch_size: int, num_micro_batches: int, setting: Setting = MAIN_SETTING
    ) -> PaperPolicy | None:
        """The best r_w and r_c of a batch, in closed form; None if it does not fit.

        No term of time grows with r_w, and memory is linear in it: so as much as the GPU holds.
        With A_g = 1 the GPU counts the whole cache anyway, so r_c = 1 costs nothing. With
        A_g = 0 or F_g = 0 cache or weights lie where they are used, on the CPU.
        """
        none = _all_below(micro_batch_size, num_micro_batches, setting)
        most = replace(none, r_w=float(none.ffn_on_gpu))
        policy = replace(none, r_w=self._largest_r_w(none, most))
        fits = self.model.on_gpu(policy).fits and self.model.on_cpu(policy).fits
        return policy if fits else None

    def _best_of(self, mu: int, setting: Setting) -> PaperPlan:
        """With the fewest micro-batches from which on one more does not fit or does not pay.

        With the best shares time is convex in N, and so time per sequence falls, stays and rises:
        what has ceased to pay never pays again, and doubling and halving finds the place.
        """

        def plan_of(num_micro_batches: int) -> PaperPlan | None:
            if num_micro_batches * mu > MAX_SEQUENCES:
                return None
            policy = self.best_shares(mu, num_micro_batches, setting)
            return self.model.evaluate(policy) if policy else None

        def another_pays(num_micro_batches: int) -> bool:
            plan, larger = plan_of(num_micro_batches), plan_of(num_micro_batches + 1)
            if plan is None or larger is None:
                return False
            return larger.sequence_layer_s < plan.sequence_layer_s * (1 - _NO_GAIN)

        low, high = 0, 1
        while another_pays(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if another_pays(middle) else (low, middle)
        plan = plan_of(high)
        assert plan is not None, "one micro-batch fits, and more are taken only where they do"
        return plan

    def _largest_r_w(self, none: PaperPolicy, most: PaperPolicy) -> float:
        at_none, at_most = self.model.on_gpu(none), self.model.on_gpu(most)
        if at_most.fits or none == most:
            return most.r_w
        grown = at_most.total_bytes - at_none.total_bytes
        if grown <= 0:  # buffers take no less than all of one or two layers: neither fits
            return none.r_w
        room = at_none.limit_bytes - at_none.total_bytes
        return max(0.0, room / grown)

    def _too_small(self) -> str:
        level, policy = "vram", _all_below(1, 1, MAIN_SETTING)
        use = self.model.on_gpu(policy)
        if use.fits:
            r_w = self._largest_r_w(policy, replace(policy, r_w=1.0))
            level, use = "dram", self.model.on_cpu(replace(policy, r_w=r_w))
        term, num_bytes = max(use.terms.items(), key=lambda item: item[1])
        return (
            f"{level}: one sequence needs {format_bytes(use.total_bytes)}, and MoE-Lightning's "
            f"planner has {format_bytes(use.limit_bytes)}; the largest term is {term}, "
            f"{format_bytes(num_bytes)}; plan without --paper, or for a machine with more {level}"
        )


# --- the answer, in the words of moebatch -------------------------------------------------------


def answer_paper(problem: Problem, model: str) -> Answer:
    """The policy of the highest decode throughput by MoE-Lightning's forms.

    Raises DoesNotFit, and ConfigError for machines without a GPU.
    """
    workload = problem.workload
    asked = PaperModel(
        shape=problem.shape,
        expert_bytes=problem.dtypes.expert_bytes(problem.shape),
        hardware=problem.hardware,
        prompt_tokens=workload.mean_prompt_tokens,
        gen_tokens=workload.mean_new_tokens,
    )
    found = PaperSearch(model=asked).solve()
    return Answer(
        problem=problem,
        model=model,
        method="paper",
        solver="closed form for every batch of the authors' grid",
        policy=_policy(problem, found.policy),
        prediction=_prediction(problem, found),
        notes=tuple(_notes(problem)),
    )


def _notes(problem: Problem) -> Iterator[str]:
    yield "MoE-Lightning's own forms and constants: decode steps count attention and experts only"
    if problem.dtypes.converts:
        yield f"by these forms {problem.dtypes.stored} is decoded in no time"


def _policy(problem: Problem, found: PaperPolicy) -> Policy:
    streamed = (1 - found.r_w) * problem.shape.num_experts
    return Policy(
        batch_size=found.batch_size,
        micro_batch_size=found.micro_batch_size,
        tokens_per_pass=found.batch_size,
        num_slots=ceil(2 * streamed),  # the weights of two layers, as far as they are not resident
        num_kv_pages=found.batch_size * problem.fewest_pages,
        weights=Placement(vram=found.r_w, dram=1 - found.r_w),
        kv_cache=Placement(vram=found.r_c, dram=1 - found.r_c),
        attention_on_gpu=found.attention_on_gpu,
        ffn_on_gpu=found.ffn_on_gpu,
        schedule="flexgen" if found.attention_on_gpu else "cgopipe",
        batching="static",
    )


def _prediction(problem: Problem, found: PaperPlan) -> Prediction:
    workload, batch, lanes = problem.workload, found.policy.batch_size, found.busy_s
    steps = workload.mean_new_tokens - 1
    batches = None if workload.num_sequences is None else ceil(workload.num_sequences / batch)
    batch_s = found.prefill_s + found.decode_s
    together, generated = batches or 1, (workload.num_sequences or 0) * workload.mean_new_tokens
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
            lane: seconds * steps * problem.shape.num_layers * together
            for lane, seconds in lanes.items()
        },
        num_passes=None if batches is None else batches * (steps + 1),
        job_time_s=None if batches is None else batches * batch_s,
    )
