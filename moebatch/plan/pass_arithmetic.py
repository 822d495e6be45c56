"""Seconds in which processors compute during a pass."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

from moebatch.layout.distinct_experts import distinct_experts
from moebatch.layout.elementwise import elementwise_bytes
from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import gpu_prompt_rows, mean_product_rows
from moebatch.plan.prices import Prices
from moebatch.schedule.registry import traits_of
from moebatch.spec.hardware import Processor
from moebatch.spec.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PassArithmetic:
    """The arithmetic of one pass under one policy.

    A machine without a GPU does everything on its CPU. One with a GPU leaves to the CPU, as the
    policy says, the attention of decoding sequences (A_g = 0) and the experts (F_g = 0).
    """

    prices: Prices
    load: PassLoad
    policy: Policy

    @property
    def key(self) -> Hashable:
        """All that `lanes` depends on beside the prices: many policies share it."""
        policy = self.policy
        return (
            self.load,
            policy.micro_batch_size,
            policy.schedule,
            policy.attention_on_gpu,
            policy.ffn_on_gpu,
            policy.weights.disk,
        )

    def lanes(self) -> Iterator[tuple[str, float]]:
        """Lane and seconds of each kind of arithmetic."""
        layers, load, prices = self.prices.shape.num_layers, self.load, self.prices
        lane, main = self._where(on_gpu=True)
        yield lane, self._dense_s(main)
        yield lane, layers * prices.prompt_attention_s(load, main)
        lane, attending = self._where(on_gpu=self.policy.attention_on_gpu)
        yield lane, layers * prices.decode_attention_s(load, attending)
        yield self._experts()

    @property
    def outside_s(self) -> float:
        """Everything but the experts, one after the other."""
        everything_s, experts_s = sum(seconds for _, seconds in self.lanes()), self._experts()[1]
        return everything_s - experts_s

    @property
    def expert_s(self) -> float:
        """One expert, on those tokens of the pass that choose it."""
        shape = self.prices.shape
        active = len(shape.moe_layers) * distinct_experts(shape, self.load.tokens)
        return self._experts()[1] / max(1.0, active)

    @property
    def gaps_s(self) -> tuple[float, float]:
        """Longest time in which a CPU gives no slot back, in every layer: from the last expert of
        one layer that arrives to the first of the next, both computed, with the rest of a layer and
        the experts that stay between them; and the same when the head comes between, too."""
        prices, load, cpu = self.prices, self.load, self.prices.cpu
        layers, moe_layers = prices.shape.num_layers, len(prices.shape.moe_layers)
        attention_s = prices.prompt_attention_s(load, cpu) + prices.decode_attention_s(load, cpu)
        head_s = prices.head_s(cpu, load.logits_rows)
        outside_s = (self._dense_s(cpu) - head_s) / layers + attention_s
        experts_s = self._cpu_experts_s(cpu) / moe_layers
        each_s = experts_s / max(1.0, distinct_experts(prices.shape, load.tokens))
        staying_s = self.policy.weights.dram * experts_s
        gap_s = outside_s + staying_s + 2 * each_s
        return gap_s, gap_s + head_s

    def _experts(self) -> tuple[str, float]:
        lane, processor = self._where(on_gpu=self.policy.ffn_on_gpu)
        on_gpu = lane == "gpu"
        return lane, self._gpu_experts_s(processor) if on_gpu else self._cpu_experts_s(processor)

    def _where(self, *, on_gpu: bool) -> tuple[str, Processor]:
        """Lane and processor of what the policy would have on the GPU, or on the CPU beside it."""
        gpu = self.prices.hardware.vram and self.prices.hardware.vram.processor
        return ("gpu", gpu) if gpu and on_gpu else ("cpu", self.prices.cpu)

    def _dense_s(self, processor: Processor) -> float:
        """Projections, routers, shared experts, dense MLPs, norms and the head."""
        prices, shape, load = self.prices, self.prices.shape, self.load
        params = shape.resident_params - shape.embedding_params
        layers_s = prices.dense_gemm_s(processor, load, params, self.policy.micro_batch_size)
        moved = elementwise_bytes(shape, prices.dtypes.compute_bytes)
        moved_s = load.tokens * shape.num_layers * moved / processor.elementwise_bandwidth
        return layers_s + prices.head_s(processor, load.logits_rows) + moved_s

    def _cpu_experts_s(self, processor: Processor) -> float:
        """Once over all tokens of the pass."""
        fresh, prices = self.policy.weights.disk, self.prices

        def each_s(rows: float) -> float:
            compute = prices.dtypes.compute
            padded = mean_product_rows(rows, compute, processor.instruction_set)
            return prices.cpu_expert_s(processor, padded, fresh=fresh)

        return self._expert_layers_s(self.load.tokens, each_s)

    def _gpu_experts_s(self, processor: Processor) -> float:
        """Once over all tokens of the pass; or, in schedules that go micro-batch by micro-batch,
        once for each, with the weights read from the level's memory every time."""
        each_s = partial(self.prices.expert_s, processor)
        if traits_of(self.policy).runs == "pass":
            return self._expert_layers_s(self.load.tokens, each_s)
        kinds = (
            (self.load.decode_sequences, self.policy.micro_batch_size),
            (self.load.prompt_tokens, gpu_prompt_rows(self.policy)),
        )
        total_s = 0.0
        for tokens, at_once in kinds:
            if tokens:
                size = min(at_once, tokens)
                total_s += tokens / size * self._expert_layers_s(size, each_s)
        return total_s

    def _expert_layers_s(self, tokens: float, each_s: Callable[[float], float]) -> float:
        """All experts once; `each_s` are seconds of one by its rows."""
        shape = self.prices.shape
        active = distinct_experts(shape, tokens)
        if not active:
            return 0.0
        rows = tokens * shape.experts_per_token / active
        return len(shape.moe_layers) * active * each_s(rows)
