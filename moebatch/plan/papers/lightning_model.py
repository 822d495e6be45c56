"""MoE-Lightning's model of time and memory, with its constants and roundings.

It ranks policies well and is 1.6 to 2.4 times too optimistic about time; moebatch's own model is in
`plan/pricing/cost.py`. By the forms here the published policies come out exactly, so they are kept
even where they can be argued with:

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
from typing import cast

from moebatch.errors import ConfigError
from moebatch.layout.lanes import LaneSeconds
from moebatch.plan.roofline import ffn_flops
from moebatch.schedule.lanes import CPU, GPU, UP
from moebatch.spec.machine.hardware import Hardware, Level, Processor
from moebatch.spec.model.shape import ModelShape

GPU_SHARE = 0.86
"""Share of GPU memory that the authors let the planner use."""
CPU_SHARE = 0.8
WORKSPACE_SLACK = 1.2
"""Slack on the work space of the fused expert kernel."""


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
class PaperUse:
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
    busy_s: LaneSeconds
    """T_gpu, T_cpu and T_comm (weights and cache to the GPU), per layer and decode step."""
    prefill_s: float
    """Prompts of the whole batch through all layers."""
    decode_s: float
    """All further tokens of the whole batch."""
    decode_tokens_per_s: float
    """N n / decode time: the figure that the authors' planner prints."""
    tokens_per_s: float
    """N n / (prefill + decode time): the figure of the paper's tables."""
    gpu_memory: PaperUse
    cpu_memory: PaperUse

    @property
    def layer_s(self) -> float:
        """T_layer (Eq 12): the three overlap, so the slowest counts."""
        return max(self.busy_s.values())

    @property
    def sequence_layer_s(self) -> float:
        """T_layer / N: what the planner minimises."""
        return self.layer_s / self.policy.batch_size


# --- FLOP and bytes of one layer, as the authors count them -------------------------------------


def cache_bytes(shape: ModelShape, tokens: float) -> float:
    """Keys and values of a sequence in one layer, and its states."""
    of_tokens = shape.kv_bytes_per_token(shape.dtype_bytes) * tokens
    return (of_tokens + shape.state_bytes(shape.dtype_bytes)) / shape.num_layers


def attention_flops(shape: ModelShape, batch: float, queries: float, context: float) -> float:
    """FLOP of attention in one layer, `queries` tokens of each sequence against `context`.

    Counts one of the two matrix products, as the authors do; a recurrence, which they do not know,
    as a whole.
    """
    width = sum(each.query_width + each.num_heads for each in shape.attending)
    of_token = 2 * context * (width / shape.num_layers)
    if shape.recurrence is not None:
        delta, recurrent = shape.recurrence, len(shape.recurrent_layers) / shape.num_layers
        of_token += recurrent * (delta.decode_flops if queries == 1 else delta.prompt_flops)
    return batch * queries * of_token


def attention_bytes(shape: ModelShape, batch: float, queries: float, context: float) -> float:
    """Bytes that attention touches in one layer: queries and outputs, keys and values, and states,
    which are read and written."""
    width = sum(each.query_width for each in shape.attending) / shape.num_layers
    ends = 2 * queries * width * shape.dtype_bytes
    written = shape.state_bytes(shape.dtype_bytes) / shape.num_layers
    return batch * (ends + cache_bytes(shape, context) + written)


def ffn_bytes(shape: ModelShape, tokens: float, *, expert_bytes: int) -> float:
    """Bytes that the experts of one layer touch: all of their weights, inputs and outputs.

    The output is as wide as an expert, as the authors have it; it makes no difference.
    """
    activations = tokens * (shape.hidden_size + shape.expert_width)
    return shape.dtype_bytes * activations + shape.num_experts * expert_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperModel:
    """The Hierarchical Roofline Model of one model, machine and workload, as the authors solve it:
    seconds of a layer and of a batch's prompts, and bytes of either memory.

    Every layer is taken to have experts, and nothing beside them but attention, or a recurrence in
    the place of it: of models with both, layers are mean ones. Raises ConfigError for machines
    without a GPU.
    """

    shape: ModelShape
    expert_bytes: int
    """Of one expert, as it is stored."""
    hardware: Hardware
    prompt_tokens: float
    """s: the mean, or the longest if prompts are padded."""
    gen_tokens: float
    """n."""

    def __post_init__(self) -> None:
        assert self.prompt_tokens > 0 and self.gen_tokens > 0, "prompts and answers have tokens"
        for name in ("vram", "dram"):
            level = self.hardware.levels.get(name)
            if level is None or level.processor is None:
                self._refuse(f"levels.{name}", " and its processor")
        if "dram->vram" not in self.hardware.links:
            self._refuse("links.dram->vram", "")

    def evaluate(self, policy: PaperPolicy) -> PaperPlan:
        """Times and memory of any policy, whether it fits or not."""
        busy_s = self.busy_s(policy)
        # An answer of one token comes with prefill; it is counted as one step, not as none.
        steps = max(self.gen_tokens - 1, 1)
        decode_s = steps * self.shape.num_layers * max(busy_s.values())
        prefill_s = self.prefill_s(policy)
        tokens = policy.batch_size * self.gen_tokens
        return PaperPlan(
            policy=policy,
            busy_s=busy_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            decode_tokens_per_s=tokens / decode_s,
            tokens_per_s=tokens / (prefill_s + decode_s),
            gpu_memory=self.on_gpu(policy),
            cpu_memory=self.on_cpu(policy),
        )

    # --- seconds of one layer in a decode step (Eq 12 to 14), and of prefill ----------------------

    def busy_s(self, policy: PaperPolicy) -> dict[str, float]:
        """Seconds that either processor computes, and that weights and cache take to the GPU;
        hidden states where it has no FFN."""
        traffic = 0.0
        if policy.ffn_on_gpu:
            traffic += (1 - policy.r_w) * self.weights_bytes
        else:
            traffic += self.hidden_bytes(policy.batch_size)
        if policy.attention_on_gpu:
            context = self.prompt_tokens + self.gen_tokens / 2
            traffic += (1 - policy.r_c) * self.kv_bytes(policy.batch_size, context)
        return {
            GPU.name: self._computing_s(policy, self._gpu, on_gpu=True),
            CPU.name: self._computing_s(policy, self._cpu, on_gpu=False),
            UP.name: traffic / self._link_bandwidth,
        }

    def prefill_s(self, policy: PaperPolicy) -> float:
        """Seconds of the prompts of a batch through all layers, everything on the GPU."""
        prompt, mu = self.prompt_tokens, policy.micro_batch_size
        hidden = self.hidden_bytes(policy.batch_size * prompt)
        comm_s = ((1 - policy.r_w) * self.weights_bytes + hidden) / self._link_bandwidth
        gpu_s = self._attention_s(self._gpu, mu, prompt, prompt)
        gpu_s += self._ffn_s(self._gpu, mu * prompt)
        return self.shape.num_layers * max(comm_s, policy.num_micro_batches * gpu_s)

    def _computing_s(self, policy: PaperPolicy, processor: Processor, *, on_gpu: bool) -> float:
        mu, seconds = policy.micro_batch_size, 0.0
        if policy.attention_on_gpu == on_gpu:
            seconds += self._attention_s(processor, mu, 1, self.total_tokens)
        if policy.ffn_on_gpu == on_gpu:
            seconds += self._ffn_s(processor, mu)
        return policy.num_micro_batches * seconds

    def _attention_s(
        self, processor: Processor, batch: float, queries: float, context: float
    ) -> float:
        flops = attention_flops(self.shape, batch, queries, context)
        return self._roof_s(processor, flops, attention_bytes(self.shape, batch, queries, context))

    def _ffn_s(self, processor: Processor, tokens: float) -> float:
        num_bytes = ffn_bytes(self.shape, tokens, expert_bytes=self.expert_bytes)
        return self._roof_s(processor, ffn_flops(self.shape, tokens), num_bytes)

    def _roof_s(self, processor: Processor, flops: float, num_bytes: float) -> float:
        """Eq 14."""
        peak = processor.gemm_for(self.shape.dtype).peak
        return max(flops / peak, num_bytes / processor.bandwidth)

    # --- bytes of either memory -------------------------------------------------------------------

    def on_gpu(self, policy: PaperPolicy) -> PaperUse:
        """GPU memory in the phase that takes more, against 0.86 m_g."""
        phases = (self.home_decode(policy), self.home_prefill(policy))
        home = max(phases, key=lambda terms: sum(terms.values()))
        streaming = {
            "weight buffers": self.weight_buffers(policy),
            "workspace": self.workspace(policy),
        }
        limit = GPU_SHARE * self._vram.capacity_bytes
        return PaperUse(terms=home | streaming, limit_bytes=limit)

    def on_cpu(self, policy: PaperPolicy) -> PaperUse:
        """CPU memory, against 0.8 m_c."""
        hidden = self.hidden_bytes(policy.batch_size * self.prompt_tokens)
        terms = {
            "experts": self._experts * (1 - policy.r_w),
            "keys and values": self._cache(policy) * (1 - policy.r_c),
            "hidden states": hidden * self._vram.num_devices,
            "pinned buffers": self.weight_buffers(policy),
        }
        limit = CPU_SHARE * self.hardware.dram.capacity_bytes
        return PaperUse(terms=terms, limit_bytes=limit)

    def home_decode(self, policy: PaperPolicy) -> dict[str, float]:
        """Bytes that stay on the GPU while answers are generated, by term."""
        on_gpu = policy.r_c + (1 - policy.r_c) * policy.attention_on_gpu
        hidden = 2 * self.hidden_bytes(policy.batch_size)
        return self._home(policy, hidden, self._cache(policy) * on_gpu)

    def home_prefill(self, policy: PaperPolicy) -> dict[str, float]:
        """Bytes that stay on the GPU while prompts are read, by term.

        The share of the cache counts one layer, where the authors have dropped a factor L.
        """
        prompt = self.prompt_tokens
        cache = policy.r_c * self.kv_bytes(policy.batch_size, prompt)
        leaving = (1 - policy.r_c) * self.kv_bytes(policy.micro_batch_size, prompt)
        hidden = self.hidden_bytes(prompt) * (2 * policy.micro_batch_size + policy.batch_size)
        return self._home(policy, hidden, cache + 2 * leaving)

    def workspace(self, policy: PaperPolicy) -> float:
        """Bytes of the fused expert kernel, at the size of prefill in both phases."""
        shape = self.shape
        rows = policy.micro_batch_size * shape.experts_per_token * self.prompt_tokens
        widths = shape.hidden_size * self._vram.num_devices + 3 * shape.expert_width
        return WORKSPACE_SLACK * shape.dtype_bytes * rows * widths

    def weight_buffers(self, policy: PaperPolicy) -> float:
        """Bytes of the two buffers for the streamed weights of a layer, on either side (A.1)."""
        return 2 * self.weights_bytes * (1 - policy.r_w)

    def _home(self, policy: PaperPolicy, hidden: float, cache: float) -> dict[str, float]:
        return {
            "attention weights": self.attention_weights_bytes,
            "experts": self._experts * policy.r_w,
            "hidden states": hidden * self._vram.num_devices,
            "keys and values": cache,
        }

    # --- sizes, and the machine -------------------------------------------------------------------

    @property
    def weights_bytes(self) -> int:
        """W_e: the experts of one layer."""
        return self.shape.num_experts * self.expert_bytes

    @property
    def attention_weights_bytes(self) -> int:
        """W_o: the projections of attention of all layers, always on the GPU."""
        return self.shape.dtype_bytes * self.shape.all_mixer_params

    def kv_bytes(self, sequences: float, tokens: float) -> float:
        """Keys and values of one layer, and states."""
        return sequences * cache_bytes(self.shape, tokens)

    def hidden_bytes(self, tokens: float) -> float:
        return self.shape.dtype_bytes * self.shape.hidden_size * tokens

    @property
    def total_tokens(self) -> float:
        """s + n."""
        return self.prompt_tokens + self.gen_tokens

    def _cache(self, policy: PaperPolicy) -> float:
        """Keys and values of whole sequences in all layers."""
        return self.kv_bytes(policy.batch_size, self.total_tokens) * self.shape.num_layers

    @property
    def _experts(self) -> int:
        """Experts of all layers."""
        return self.weights_bytes * self.shape.num_layers

    @property
    def _vram(self) -> Level:
        """GPU memory: of all GPUs together, over which every layer is split."""
        return self.hardware.levels["vram"]

    @property
    def _gpu(self) -> Processor:
        return cast(Processor, self._vram.processor)

    @property
    def _cpu(self) -> Processor:
        return cast(Processor, self.hardware.dram.processor)

    @property
    def _link_bandwidth(self) -> float:
        return self.hardware.links["dram->vram"].bandwidth

    def _refuse(self, where: str, beside: str) -> None:
        message = (
            f"missing{beside}: MoE-Lightning's planner is for a GPU beside a CPU; plan without "
            "--paper, or for a machine with a GPU"
        )
        raise ConfigError.at(self.hardware.name, message, where=where)
