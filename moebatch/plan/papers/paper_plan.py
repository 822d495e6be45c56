"""A policy and what MoE-Lightning's model says of it."""

from dataclasses import dataclass
from typing import Literal

from moebatch.plan.papers.paper_memory import MemoryUse
from moebatch.plan.papers.paper_policy import PaperPolicy

Bound = Literal["link", "cpu", "gpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperPlan:
    """A policy and what the model says of it."""

    policy: PaperPolicy
    comm_s: float
    """T_comm: weights and cache to the GPU, per layer and decode step."""
    cpu_s: float
    """T_cpu, likewise."""
    gpu_s: float
    """T_gpu, likewise."""
    prefill_s: float
    """Prompts of the whole batch through all layers."""
    decode_s: float
    """All further tokens of the whole batch."""
    decode_tokens_per_s: float
    """N n / decode time: the figure that the authors' planner prints."""
    tokens_per_s: float
    """N n / (prefill + decode time): the figure of the paper's tables."""
    gpu_memory: MemoryUse
    cpu_memory: MemoryUse

    @property
    def layer_s(self) -> float:
        """T_layer (Eq 12): the three overlap, so the slowest counts."""
        return max(self.comm_s, self.cpu_s, self.gpu_s)

    @property
    def bound(self) -> Bound:
        """What the decode step waits for."""
        times: dict[Bound, float] = {"link": self.comm_s, "cpu": self.cpu_s, "gpu": self.gpu_s}
        return max(times, key=lambda name: times[name])

    @property
    def fits(self) -> bool:
        """Whether both memories are within their limits."""
        return self.gpu_memory.fits and self.cpu_memory.fits

    @property
    def sequence_layer_s(self) -> float:
        """T_layer / N: what the planner minimises."""
        return self.layer_s / self.policy.batch_size
