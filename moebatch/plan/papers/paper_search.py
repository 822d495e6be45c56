"""MoE-Lightning's search for the best policy, under its own model of time and memory.

The authors solve a small linear program for each micro-batch size and number of micro-batches. With
their forms it has a closed solution, so there is no solver here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from moebatch.errors import DoesNotFit
from moebatch.plan.papers.paper import PaperModel
from moebatch.plan.papers.paper_plan import PaperPlan
from moebatch.plan.papers.paper_policy import PaperPolicy
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
        """The best plan of every micro-batch size of the authors' grid, for each setting."""
        for setting in self.settings:
            for mu in micro_batch_grid():
                plan = self._best_of(mu, setting)
                if plan is None:  # nor do larger ones fit
                    break
                yield plan

    def best_shares(
        self, micro_batch_size: int, num_micro_batches: int, setting: Setting = MAIN_SETTING
    ) -> PaperPolicy | None:
        """The best r_w and r_c of a batch, in closed form; None if it does not fit.

        No term of time grows with r_w, and memory is linear in it: so as much as the GPU holds.
        With A_g = 1 the GPU counts the whole cache anyway, so r_c = 1 costs nothing. With
        A_g = 0 or F_g = 0 cache or weights lie where they are used, on the CPU.
        """
        attention_on_gpu, ffn_on_gpu = setting

        def with_weights(r_w: float) -> PaperPolicy:
            return PaperPolicy(
                micro_batch_size=micro_batch_size,
                num_micro_batches=num_micro_batches,
                attention_on_gpu=attention_on_gpu,
                ffn_on_gpu=ffn_on_gpu,
                r_w=r_w,
                r_c=float(attention_on_gpu),
            )

        none, most = with_weights(0), with_weights(float(ffn_on_gpu))
        policy = with_weights(self._largest_r_w(none, most))
        fits = self.model.memory.on_gpu(policy).fits and self.model.memory.on_cpu(policy).fits
        return policy if fits else None

    def _best_of(self, mu: int, setting: Setting) -> PaperPlan | None:
        """With the fewest micro-batches from which on one more does not fit or does not pay.

        With the best shares time is convex in N, and so time per sequence falls, stays and rises:
        what has ceased to pay never pays again, and doubling and halving finds the place.
        """

        def plan_of(num_micro_batches: int) -> PaperPlan | None:
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
        return plan_of(high)

    def _largest_r_w(self, none: PaperPolicy, most: PaperPolicy) -> float:
        at_none, at_most = self.model.memory.on_gpu(none), self.model.memory.on_gpu(most)
        if at_most.fits or none == most:
            return most.r_w
        room = at_none.limit_bytes - at_none.total_bytes
        return max(0.0, room / (at_most.total_bytes - at_none.total_bytes))

    def _too_small(self) -> str:
        level, policy = "vram", PaperPolicy(micro_batch_size=1, num_micro_batches=1, r_w=0)
        use = self.model.memory.on_gpu(policy)
        if use.fits:
            most = PaperPolicy(micro_batch_size=1, num_micro_batches=1, r_w=1)
            r_w = self._largest_r_w(policy, most)
            policy = PaperPolicy(micro_batch_size=1, num_micro_batches=1, r_w=r_w)
            level, use = "dram", self.model.memory.on_cpu(policy)
        term, num_bytes = max(use.terms.items(), key=lambda item: item[1])
        return (
            f"{level}: one sequence needs {format_bytes(use.total_bytes)}, and MoE-Lightning's "
            f"planner has {format_bytes(use.limit_bytes)}; the largest term is {term}, "
            f"{format_bytes(num_bytes)}; plan without --paper, or for a machine with more {level}"
        )
