"""MoE-Lightning's own model of time and memory, with its constants and roundings.

What ``moebatch plan --paper`` goes by; `plan/paper_search.py` finds the best policy under it. It
ranks policies well and is 1.6 to 2.4 times too optimistic about time; moebatch's own model is in
`plan/cost.py`. By the forms here the published policies come out exactly, so they are kept even
where they can be argued with:

- attention counts one of its two matrix products, and a context of ``s + n`` tokens for time,
  ``s + n/2`` for traffic of keys and values;
- every micro-batch reads all experts of a layer, once;
- projections, norms, the head and traffic off the GPU cost no time, embeddings no memory;
- keys and values kept for attention on the GPU are counted in GPU memory as a whole, whatever
  share of them lives there.

The letters: ``s`` tokens of a prompt, ``n`` of an answer, ``mu`` sequences of a micro-batch, ``M``
micro-batches, ``N = M mu`` sequences of a batch, ``A_g`` and ``F_g`` whether attention and expert
FFN are computed on the GPU, ``r_w`` and ``r_c`` the shares of weights and of keys and values on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moebatch.errors import ConfigError, Fault
from moebatch.spec.hardware import Hardware, Level, Processor
from moebatch.spec.shape import ModelShape

GPU_SHARE = 0.86
"""Share of GPU memory that the authors let the planner use."""
CPU_SHARE = 0.8
WORKSPACE_SLACK = 1.2
"""Slack on the work space of the fused expert kernel."""
Bound = Literal["link", "cpu", "gpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperPolicy:
    """The six unknowns of Table 1."""

    micro_batch_size: int
    """mu."""
    num_micro_batches: int
    """M."""
    r_w: float
    r_c: float = 0.0
    attention_on_gpu: bool = False
    """A_g."""
    ffn_on_gpu: bool = True
    """F_g."""

    @property
    def batch_size(self) -> int:
        """N, sequences."""
        return self.num_micro_batches * self.micro_batch_size


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


def attention_flops(shape: ModelShape, batch: float, queries: float, context: float) -> float:
    """FLOP of attention in one layer, `queries` tokens of each sequence against `context`.

    Counts one of the two matrix products, as the authors do.
    """
    return 2 * batch * queries * context * (shape.query_width + shape.num_heads)


def attention_bytes(shape: ModelShape, batch: float, queries: float, context: float) -> float:
    """Bytes that attention touches in one layer: queries and outputs, keys and values."""
    numbers = batch * (2 * queries * shape.query_width + context * shape.cache_width)
    return shape.dtype_bytes * numbers


def ffn_flops(shape: ModelShape, tokens: float) -> float:
    """FLOP of the experts of one layer for `tokens` tokens."""
    return 2 * shape.expert_params * shape.experts_per_token * tokens


def ffn_bytes(shape: ModelShape, tokens: float) -> float:
    """Bytes that the experts of one layer touch: all of their weights, inputs and outputs.

    The output is as wide as an expert, as the authors have it; it makes no difference.
    """
    activations = tokens * (shape.hidden_size + shape.expert_width)
    return shape.dtype_bytes * activations + shape.num_experts * shape.expert_stored_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperModel:
    """The Hierarchical Roofline Model of one model, machine and workload, as the authors solve it.

    Every layer is taken to have experts, and nothing beside them but attention.
    """

    shape: ModelShape
    hardware: Hardware
    prompt_tokens: float
    """s: the mean, or the longest if prompts are padded."""
    gen_tokens: float
    """n."""

    def __post_init__(self) -> None:
        assert self.prompt_tokens > 0 and self.gen_tokens > 0, "prompts and answers have tokens"
        for level, where in ((self.hardware.vram, "vram"), (self.hardware.dram, "dram")):
            if level is None or level.processor is None:
                self._refuse(f"levels.{where}", "and its processor")
        if "dram->vram" not in self.hardware.links:
            self._refuse("links.dram->vram", "")

    # Sizes

    @property
    def weights_bytes(self) -> float:
        """W_e: the experts of one layer."""
        return self.shape.num_experts * self.shape.expert_stored_bytes

    @property
    def attention_weights_bytes(self) -> float:
        """W_o: the projections of attention of all layers, always on the GPU."""
        return self._dt * self.shape.attention_params * self.shape.num_layers

    def kv_bytes(self, sequences: float, tokens: float) -> float:
        """Keys and values of one layer."""
        return self._dt * self.shape.cache_width * sequences * tokens

    # Time of one layer in a decode step (Eq 12 to 14)

    def t_comm(self, policy: PaperPolicy) -> float:
        """Seconds that weights and cache take to the GPU; hidden states where it has no FFN."""
        traffic = 0.0
        if policy.ffn_on_gpu:
            traffic += (1 - policy.r_w) * self.weights_bytes
        else:
            traffic += self._dt * self.shape.hidden_size * policy.batch_size
        if policy.attention_on_gpu:
            context = self.prompt_tokens + self.gen_tokens / 2
            traffic += (1 - policy.r_c) * self.kv_bytes(policy.batch_size, context)
        return traffic / self._link_bandwidth

    def t_cpu(self, policy: PaperPolicy) -> float:
        """Seconds that the CPU computes."""
        attention = not policy.attention_on_gpu, self._t_attention(policy, self._cpu)
        ffn = not policy.ffn_on_gpu, self._t_ffn(policy, self._cpu)
        return sum(seconds for here, seconds in (attention, ffn) if here)

    def t_gpu(self, policy: PaperPolicy) -> float:
        """Seconds that the GPU computes."""
        attention = policy.attention_on_gpu, self._t_attention(policy, self._gpu)
        ffn = policy.ffn_on_gpu, self._t_ffn(policy, self._gpu)
        return sum(seconds for here, seconds in (attention, ffn) if here)

    def prefill_s(self, policy: PaperPolicy) -> float:
        """Seconds of the prompts of a batch through all layers, everything on the GPU."""
        tokens = policy.micro_batch_size * self.prompt_tokens
        hidden = self._dt * self.shape.hidden_size * policy.batch_size * self.prompt_tokens
        comm = ((1 - policy.r_w) * self.weights_bytes + hidden) / self._link_bandwidth
        lengths = (policy.micro_batch_size, self.prompt_tokens, self.prompt_tokens)
        gpu = self._roof_s(
            self._gpu, attention_flops(self.shape, *lengths), attention_bytes(self.shape, *lengths)
        )
        gpu += self._roof_s(self._gpu, ffn_flops(self.shape, tokens), ffn_bytes(self.shape, tokens))
        return self.shape.num_layers * max(comm, policy.num_micro_batches * gpu)

    # Memory

    def home_decode(self, policy: PaperPolicy) -> dict[str, float]:
        """Bytes that stay on the GPU while answers are generated, by term."""
        on_gpu = policy.r_c + (1 - policy.r_c) * policy.attention_on_gpu
        tokens = self.prompt_tokens + self.gen_tokens
        cache = self.kv_bytes(policy.batch_size, tokens) * self.shape.num_layers
        hidden = 2 * self._dt * self.shape.hidden_size * policy.batch_size
        return self._home_weights(policy) | {
            "hidden states": hidden * self._tp,
            "keys and values": cache * on_gpu,
        }

    def home_prefill(self, policy: PaperPolicy) -> dict[str, float]:
        """Bytes that stay on the GPU while prompts are read, by term.

        The share of the cache counts one layer, where the authors have dropped a factor L.
        """
        row = self._dt * self.shape.hidden_size * self.prompt_tokens
        cache = policy.r_c * self.kv_bytes(policy.batch_size, self.prompt_tokens)
        leaving = (1 - policy.r_c) * self.kv_bytes(policy.micro_batch_size, self.prompt_tokens)
        hidden = 2 * row * policy.micro_batch_size + row * policy.batch_size
        return self._home_weights(policy) | {
            "hidden states": hidden * self._tp,
            "keys and values": cache + 2 * leaving,
        }

    def workspace(self, policy: PaperPolicy) -> float:
        """Bytes of the fused expert kernel, at the size of prefill in both phases."""
        rows = policy.micro_batch_size * self.shape.experts_per_token * self.prompt_tokens
        widths = self.shape.hidden_size * self._tp + 3 * self.shape.expert_width
        return WORKSPACE_SLACK * self._dt * rows * widths

    def weight_buffers(self, policy: PaperPolicy) -> float:
        """Bytes of the two buffers for the streamed weights of a layer, on either side (A.1)."""
        return 2 * self.weights_bytes * (1 - policy.r_w)

    def gpu_memory(self, policy: PaperPolicy) -> MemoryUse:
        """GPU memory in the phase that takes more, against 0.86 m_g."""
        phases = (self.home_decode(policy), self.home_prefill(policy))
        home = max(phases, key=lambda terms: sum(terms.values()))
        streaming = {
            "weight buffers": self.weight_buffers(policy),
            "workspace": self.workspace(policy),
        }
        return MemoryUse(terms=home | streaming, limit_bytes=GPU_SHARE * self._vram.capacity_bytes)

    def cpu_memory(self, policy: PaperPolicy) -> MemoryUse:
        """CPU memory, against 0.8 m_c."""
        tokens = self.prompt_tokens + self.gen_tokens
        cache = self.kv_bytes(policy.batch_size, tokens) * self.shape.num_layers
        hidden = self._dt * self.shape.hidden_size * policy.batch_size * self.prompt_tokens
        terms = {
            "experts": self.weights_bytes * self.shape.num_layers * (1 - policy.r_w),
            "keys and values": cache * (1 - policy.r_c),
            "hidden states": hidden * self._tp,
            "pinned buffers": self.weight_buffers(policy),
        }
        limit = CPU_SHARE * self.hardware.dram.capacity_bytes
        return MemoryUse(terms=terms, limit_bytes=limit)

    # A plan

    def evaluate(self, policy: PaperPolicy) -> PaperPlan:
        """Times and memory of any policy, whether it fits or not."""
        comm, cpu, gpu = self.t_comm(policy), self.t_cpu(policy), self.t_gpu(policy)
        # An answer of one token comes with prefill; it is counted as one step, not as none.
        steps = max(self.gen_tokens - 1, 1)
        decode = steps * self.shape.num_layers * max(comm, cpu, gpu)
        prefill = self.prefill_s(policy)
        tokens = policy.batch_size * self.gen_tokens
        return PaperPlan(
            policy=policy,
            comm_s=comm,
            cpu_s=cpu,
            gpu_s=gpu,
            prefill_s=prefill,
            decode_s=decode,
            decode_tokens_per_s=tokens / decode,
            tokens_per_s=tokens / (prefill + decode),
            gpu_memory=self.gpu_memory(policy),
            cpu_memory=self.cpu_memory(policy),
        )

    def _t_attention(self, policy: PaperPolicy, processor: Processor) -> float:
        lengths = (policy.micro_batch_size, 1, self.prompt_tokens + self.gen_tokens)
        flops = attention_flops(self.shape, *lengths)
        num_bytes = attention_bytes(self.shape, *lengths)
        return policy.num_micro_batches * self._roof_s(processor, flops, num_bytes)

    def _t_ffn(self, policy: PaperPolicy, processor: Processor) -> float:
        flops = ffn_flops(self.shape, policy.micro_batch_size)
        num_bytes = ffn_bytes(self.shape, policy.micro_batch_size)
        return policy.num_micro_batches * self._roof_s(processor, flops, num_bytes)

    def _roof_s(self, processor: Processor, flops: float, num_bytes: float) -> float:
        """Eq 14."""
        peak = processor.gemm_for(self.shape.dtype).peak
        return max(flops / peak, num_bytes / processor.bandwidth)

    def _home_weights(self, policy: PaperPolicy) -> dict[str, float]:
        return {
            "attention weights": self.attention_weights_bytes,
            "experts": self.weights_bytes * self.shape.num_layers * policy.r_w,
        }

    def _refuse(self, where: str, beside: str) -> None:
        message = (
            f"missing {beside}".strip() + ": MoE-Lightning's planner is for a GPU beside a CPU; "
            "plan without --paper, or for a machine with a GPU"
        )
        raise ConfigError([Fault(file=self.hardware.name, where=where, message=message)])

    @property
    def _dt(self) -> int:
        return self.shape.dtype_bytes

    @property
    def _tp(self) -> int:
        """GPUs over which every layer is split; memory, bandwidth and peak are of all together."""
        return self._vram.num_devices

    @property
    def _vram(self) -> Level:
        assert self.hardware.vram is not None, "checked when the model was made"
        return self.hardware.vram

    @property
    def _gpu(self) -> Processor:
        assert self._vram.processor is not None, "checked when the model was made"
        return self._vram.processor

    @property
    def _cpu(self) -> Processor:
        assert self.hardware.dram.processor is not None, "checked when the model was made"
        return self.hardware.dram.processor

    @property
    def _link_bandwidth(self) -> float:
        return self.hardware.links["dram->vram"].bandwidth
