"""The times that Klotski's inequalities compare, from the cost model."""

from dataclasses import dataclass

from moebatch.layout.distinct_experts import distinct_experts
from moebatch.layout.elementwise import CHOICE_STATES, NORM_STATES
from moebatch.layout.load import PassLoad
from moebatch.plan.papers.klotski_bubbles import LayerTimes
from moebatch.plan.problem import Problem
from moebatch.spec.hardware import Link, Processor
from moebatch.spec.policy import Policy


def layer_times(problem: Problem, policy: Policy, *, num_hot: int) -> LayerTimes:
    """Times of a layer in a pass in which the full batch of `policy` decodes.

    Micro-batches of the policy are Klotski's batches. Weights outside experts always live where
    they are used, so there is nothing to load of attention and gate.
    """
    pieces = _Pieces(problem=problem, policy=policy)
    active = distinct_experts(problem.shape, policy.batch_size)
    expert_s = pieces.expert_s(policy.batch_size * problem.shape.experts_per_token / active)
    hot = min(num_hot, problem.shape.num_experts)
    return LayerTimes(
        attention_s=pieces.attention_s(),
        gate_s=pieces.gate_s(),
        load_expert_s=pieces.load_expert_s(),
        load_cache_s=pieces.load_cache_s(),
        hot_s=min(hot, active) * expert_s,
        cold_s=max(0.0, active - hot) * expert_s,
        num_hot=hot,
        num_cold=max(0.0, active - hot),
    )


def disk_read_s(problem: Problem, policy: Policy) -> float:
    """Seconds in which the disk gives what a mean layer needs of it, experts and cache."""
    share = policy.weights.disk
    experts = distinct_experts(problem.shape, policy.batch_size) * share
    num_bytes = experts * problem.dtypes.expert_bytes(problem.shape)
    num_bytes += policy.kv_cache.disk * _cache_bytes(problem, policy.batch_size)
    return num_bytes / problem.hardware.links["disk->dram"].bandwidth if num_bytes else 0.0


def _decoding(problem: Problem, sequences: int) -> PassLoad:
    workload = problem.workload
    context = workload.mean_prompt_tokens + workload.mean_new_tokens / 2
    return PassLoad(decode_sequences=sequences, decode_positions=sequences * context)


def _cache_bytes(problem: Problem, sequences: int) -> float:
    """Keys and values of one layer that a decoding step reads."""
    return problem.prices.cache_bytes(_decoding(problem, sequences).decode_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pieces:
    """Seconds of the pieces of one layer, for one of the batches."""

    problem: Problem
    policy: Policy

    def attention_s(self) -> float:
        prices, bs = self.problem.prices, self.policy.micro_batch_size
        projections_s = prices.gemm_s(self._processor, bs, self.problem.shape.attention_params)
        core_s = prices.decode_attention_s(_decoding(self.problem, bs), self._processor)
        return projections_s + core_s + prices.moving_s(self._processor, NORM_STATES * bs)

    def gate_s(self) -> float:
        shape, prices, bs = self.problem.shape, self.problem.prices, self.policy.micro_batch_size
        layer = shape.resident_layer_params(min(shape.moe_layers))
        gemm_s = prices.gemm_s(self._processor, bs, layer - shape.attention_params)
        return gemm_s + prices.moving_s(self._processor, NORM_STATES * bs)

    def expert_s(self, rows: float) -> float:
        prices = self.problem.prices
        gemm_s = prices.gemm_s(self._processor, rows, self.problem.shape.expert_params)
        return gemm_s + prices.moving_s(self._processor, CHOICE_STATES * rows)

    def load_expert_s(self) -> float:
        link = self._link
        if link is None or self.policy.weights.on(self.problem.ladder.top) == 1:
            return 0.0
        return self.problem.dtypes.expert_bytes(self.problem.shape) / link.bandwidth

    def load_cache_s(self) -> float:
        below = 1 - self.policy.kv_cache.on(self.problem.ladder.top)
        if self._link is None or not below:
            return 0.0
        num_bytes = below * _cache_bytes(self.problem, self.policy.micro_batch_size)
        return num_bytes / self._link.bandwidth

    @property
    def _processor(self) -> Processor:
        processor = self.problem.hardware.levels[self.problem.ladder.top].processor
        assert processor is not None, "the level that computes has a processor"
        return processor

    @property
    def _link(self) -> Link | None:
        """From the level below to the one that computes."""
        links = self.problem.hardware.links
        return links.get("dram->vram" if self.problem.with_vram else "disk->dram")
