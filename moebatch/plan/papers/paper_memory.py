"""Bytes that a policy takes of either memory, as MoE-Lightning's planner counts them."""

from collections.abc import Mapping
from dataclasses import dataclass

from moebatch.plan.papers.paper_policy import PaperPolicy
from moebatch.plan.papers.paper_problem import PaperProblem

GPU_SHARE = 0.86
"""Share of GPU memory that the authors let the planner use."""
CPU_SHARE = 0.8
WORKSPACE_SLACK = 1.2
"""Slack on the work space of the fused expert kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of one memory, by what they are for."""

    terms: Mapping[str, float]
    limit_bytes: float

    @property
    def total_bytes(self) -> float:
        """All terms together."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """Whether it is within the limit, but for rounding."""
        return self.total_bytes <= self.limit_bytes * (1 + 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperMemory:
    """What policies for one problem take of GPU and CPU memory."""

    problem: PaperProblem

    def home_decode(self, policy: PaperPolicy) -> dict[str, float]:
        """Bytes that stay on the GPU while answers are generated, by term."""
        on_gpu = policy.r_c + (1 - policy.r_c) * policy.attention_on_gpu
        hidden = 2 * self.problem.hidden_bytes(policy.batch_size)
        return self._home_weights(policy) | {
            "hidden states": hidden * self.problem.num_gpus,
            "keys and values": self._cache(policy) * on_gpu,
        }

    def home_prefill(self, policy: PaperPolicy) -> dict[str, float]:
        """Bytes that stay on the GPU while prompts are read, by term.

        The share of the cache counts one layer, where the authors have dropped a factor L.
        """
        problem, prompt = self.problem, self.problem.prompt_tokens
        cache = policy.r_c * problem.kv_bytes(policy.batch_size, prompt)
        leaving = (1 - policy.r_c) * problem.kv_bytes(policy.micro_batch_size, prompt)
        hidden = problem.hidden_bytes(prompt) * (2 * policy.micro_batch_size + policy.batch_size)
        return self._home_weights(policy) | {
            "hidden states": hidden * problem.num_gpus,
            "keys and values": cache + 2 * leaving,
        }

    def workspace(self, policy: PaperPolicy) -> float:
        """Bytes of the fused expert kernel, at the size of prefill in both phases."""
        problem, shape = self.problem, self.problem.shape
        rows = policy.micro_batch_size * shape.experts_per_token * problem.prompt_tokens
        widths = shape.hidden_size * problem.num_gpus + 3 * shape.expert_width
        return WORKSPACE_SLACK * problem.dtype_bytes * rows * widths

    def weight_buffers(self, policy: PaperPolicy) -> float:
        """Bytes of the two buffers for the streamed weights of a layer, on either side (A.1)."""
        return 2 * self.problem.weights_bytes * (1 - policy.r_w)

    def on_gpu(self, policy: PaperPolicy) -> MemoryUse:
        """GPU memory in the phase that takes more, against 0.86 m_g."""
        phases = (self.home_decode(policy), self.home_prefill(policy))
        home = max(phases, key=lambda terms: sum(terms.values()))
        streaming = {
            "weight buffers": self.weight_buffers(policy),
            "workspace": self.workspace(policy),
        }
        limit = GPU_SHARE * self.problem.vram.capacity_bytes
        return MemoryUse(terms=home | streaming, limit_bytes=limit)

    def on_cpu(self, policy: PaperPolicy) -> MemoryUse:
        """CPU memory, against 0.8 m_c."""
        hidden = self.problem.hidden_bytes(policy.batch_size * self.problem.prompt_tokens)
        terms = {
            "experts": self._experts * (1 - policy.r_w),
            "keys and values": self._cache(policy) * (1 - policy.r_c),
            "hidden states": hidden * self.problem.num_gpus,
            "pinned buffers": self.weight_buffers(policy),
        }
        limit = CPU_SHARE * self.problem.hardware.dram.capacity_bytes
        return MemoryUse(terms=terms, limit_bytes=limit)

    def _home_weights(self, policy: PaperPolicy) -> dict[str, float]:
        return {
            "attention weights": self.problem.attention_weights_bytes,
            "experts": self._experts * policy.r_w,
        }

    def _cache(self, policy: PaperPolicy) -> float:
        """Keys and values of whole sequences in all layers."""
        of_layer = self.problem.kv_bytes(policy.batch_size, self.problem.total_tokens)
        return of_layer * self.problem.shape.num_layers

    @property
    def _experts(self) -> int:
        """Experts of all layers."""
        return self.problem.weights_bytes * self.problem.shape.num_layers
