"""MoE-Lightning's own planner, with its model of time and memory, its constants and roundings.

What ``moebatch plan --paper`` goes by. It ranks policies well and is 1.6 to 2.4 times too
optimistic about time; moebatch's own model is in `plan/pricing/cost.py`. By the forms here the
published policies come out exactly, so they are kept even where they can be argued with:

- attention counts one of its two matrix products, and a context of ``s + n`` tokens for time,
  ``s + n/2`` for traffic of keys and values;
- every micro-batch reads all experts of a layer, once;
- projections, norms, the head and traffic off the GPU cost no time, embeddings no memory;
- keys and values kept for attention on the GPU are counted in GPU memory as a whole, whatever
  share of them lives there.

The authors solve a small linear program for each micro-batch size and number of micro-batches. With
their forms it has a closed solution, so there is no solver here.

The letters: ``s`` tokens of a prompt, ``n`` of an answer, ``mu`` sequences of a micro-batch, ``M``
micro-batches, ``N = M mu`` sequences of a batch, ``A_g`` and ``F_g`` whether attention and expert
FFN are computed on the GPU, ``r_w`` and ``r_c`` the shares of weights and of keys and values on it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from math import ceil
from typing import cast

from moebatch.errors import ConfigError, DoesNotFit, Fault
from moebatch.layout.lanes import LaneSeconds, bottleneck
from moebatch.plan.answer import Answer
from moebatch.plan.prediction import Prediction
from moebatch.plan.problem import Problem
from moebatch.plan.roofline import ffn_flops
from moebatch.schedule.lanes import CPU, GPU, UP
from moebatch.spec.machine.hardware import Hardware, Level, Processor
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import MAX_SEQUENCES, Placement, Policy, pages_of
from moebatch.units import format_bytes

GPU_SHARE = 0.86
"""Share of GPU memory that the authors let the planner use."""
CPU_SHARE = 0.8
WORKSPACE_SLACK = 1.2
"""Slack on the work space of the fused expert kernel."""
Setting = tuple[bool, bool]
"""(A_g, F_g)."""
MAIN_SETTING: Setting = (False, True)
"""Attention on the CPU, experts on the GPU: the paper's main setting."""
SETTINGS: tuple[Setting, ...] = (MAIN_SETTING, (True, True), (False, False), (True, False))
TIE = 1e-6
"""Policies whose throughput is within this of the best, relatively, are equally good; the smallest
batch is taken. Once the GPU binds, throughput does not change with the number of micro-batches."""
_NO_GAIN = 1e-9


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
    attending = shape.num_attention_layers / shape.num_layers
    of_token = attending * 2 * context * (shape.attention.query_width + shape.attention.num_heads)
    if shape.recurrence is not None:
        delta = shape.recurrence
        of_token += (1 - attending) * (delta.decode_flops if queries == 1 else delta.prompt_flops)
    return batch * queries * of_token


def attention_bytes(shape: ModelShape, batch: float, queries: float, context: float) -> float:
    """Bytes that attention touches in one layer: queries and outputs, keys and values, and states,
    which are read and written."""
    attending = shape.num_attention_layers / shape.num_layers
    ends = attending * 2 * queries * shape.attention.query_width * shape.dtype_bytes
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
        """Hidden states of so many tokens."""
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
        raise ConfigError([Fault(file=self.hardware.name, where=where, message=message)])


# --- the search for the best policy -------------------------------------------------------------


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
        num_kv_pages=found.batch_size * pages_of(problem.workload.max_cached_tokens),
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
