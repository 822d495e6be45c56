"""Seconds of a task on its lane: the only cost there is. A pass costs what its tasks cost.

Each task is handed to its lane, and launches kernels or copies. On a processor that comes before
its work; on a link it goes on beside the bytes of the transfer before, so the longer one counts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import cast

from moebatch.layout.elementwise import choice_states, norm_states
from moebatch.layout.ladder import lanes_of
from moebatch.layout.load import PassLoad
from moebatch.layout.routing import in_layer
from moebatch.layout.scratch import mean_product_rows, product_rows
from moebatch.once import cached_property
from moebatch.plan.pricing.dense import Mixed, Stack
from moebatch.plan.pricing.prices import Prices
from moebatch.schedule.definition import Traits
from moebatch.schedule.lanes import lane_of
from moebatch.schedule.registry import traits_of
from moebatch.schedule.steps.kv_route import FROM_ATTENTION, TO_ATTENTION
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LEVELS, LevelName, LinkName
from moebatch.spec.policy.policy import Policy


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class TaskPrices:
    """Prices pieces of one layer under a policy. Loads are those of one micro-batch."""

    prices: Prices
    policy: Policy

    def of_batch(self, kind: Kind, load: PassLoad, share: float = 1.0) -> float | None:
        """Seconds of a task that depend on nothing but what its micro-batch has to do; None for
        other kinds of tasks.

        Args:
            share: of all layers, those that the pass goes through. A mean one of all does so much
                less than one of these.
        """
        price = _OF_BATCH.get(kind)
        if price is None and kind not in KV_KINDS:
            return None
        seconds, moves = price(self, load) if price else self.kv_s(kind, load), kind in _TRANSFERS
        if moves and not seconds:
            return 0.0
        launching_s = self.prices.main.task_s + self._launching_s(kind, load)
        return max(seconds, launching_s) if moves else seconds / share + launching_s

    # --- what follows from the policy -----------------------------------------------------------

    @cached_property
    def traits(self) -> Traits:
        """What its schedule is like."""
        return traits_of(self.policy)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Names of the lanes that there are."""
        return tuple(lane.name for lane in lanes_of(self.prices.ladder, self.policy))

    @cached_property
    def attends_beside(self) -> bool:
        """Whether sequences that decode attend on the CPU beside a GPU."""
        return self.prices.top == "vram" and not self.policy.attention_on_gpu

    @cached_property
    def fresh(self) -> float:
        """Share of the experts that come from below, where that makes a difference to computing."""
        return (1 - self.policy.weights.on(self.prices.top)) * self.prices.is_cpu

    @cached_property
    def most_together(self) -> int:
        """Experts that are computed in one task."""
        return self.prices.ladder.most_together(self.policy)

    @cached_property
    def kv_homes(self) -> tuple[tuple[LevelName, float], ...]:
        """Levels where keys and values live, and in which share of the layers."""
        cache = self.policy.kv_cache
        shares = zip(LEVELS, (cache.vram, cache.dram, cache.disk), strict=True)
        return tuple([(home, share) for home, share in shares if share])

    # --- arithmetic -----------------------------------------------------------------------------

    def attend_s(self, load: PassLoad) -> float:
        """Attention, or recurrence, of a mean layer where everything else is computed."""
        prices, main = self.prices, self.prices.main
        core_s = prices.decode_attention_s(load, main) + prices.prompt_attention_s(load, main)
        core_s += prices.recurrence_s(load, main)
        return self.project_s(load) + core_s + self.out_s(load)

    def project_s(self, load: PassLoad) -> float:
        """Norm, and projections to queries, keys and values."""
        return self._mixed_s(load, self.prices.dense.projected)

    def post_out_s(self, load: PassLoad) -> float:
        """Output projection and residual where they are a part of `post`."""
        return self.out_s(load) + self._launching_s(Kind.OUT, load)

    def out_s(self, load: PassLoad) -> float:
        """Output projection and residual."""
        return self._mixed_s(load, self.prices.dense.put_out) + self.shared_s(load)

    def shared_s(self, load: PassLoad) -> float:
        """Partial results of several GPUs, each of which has a part of every matrix, become sums in
        a ring through main memory, of all devices together 2 (n - 1) times the hidden states down
        and up again; nothing with one GPU."""
        if not self._num_others:
            return 0.0
        num_bytes = 2 * self._num_others * self.prices.hidden_bytes(load.tokens)
        links: tuple[LinkName, ...] = ("vram->dram", "dram->vram")
        return sum(self.prices.link_s(name, num_bytes) for name in links)

    @cached_property
    def _num_others(self) -> int:
        """GPUs beside the first one."""
        vram = self.prices.hardware.vram
        return vram.num_devices - 1 if vram else 0

    def cpu_attention_s(self, load: PassLoad) -> float:
        """Attention of decoding sequences on the CPU beside a GPU."""
        return self.prices.decode_attention_s(load, self.prices.cpu)

    def gate_s(self, load: PassLoad, layer: int) -> float:
        """Norm and router of a layer with experts; norm and MLP of another one that has any, and
        what several GPUs add up of either. As a part of `post` with what adds up there."""
        shape, params = self.prices.shape, self.prices.dense.gates[layer]
        load = in_layer(shape, load, layer)
        beside_s = self._beside_mlp_s(load) if shape.has_mlp(layer) else 0.0
        count = self.prices.launches.of_gates[layer] + self._adding * shape.is_moe(layer)
        return self._gemm_s(load, params) + beside_s + self._task_s(count)

    def shared_expert_s(self, load: PassLoad, layer: int) -> float:
        """What all tokens share of a layer's experts, which is computed where outputs are added up;
        its launches are those of that."""
        params = self.prices.dense.shared[layer]
        return self._gemm_s(in_layer(self.prices.shape, load, layer), params)

    def gates_s(self, load: PassLoad, layers: range) -> float:
        """Gates and shared experts of those layers that a pass goes through."""
        seconds = 0.0
        for stack, tasks_s in self._gating:
            if stack.layers.start in layers:
                part = in_layer(self.prices.shape, load, stack.layers.start)
                beside_s = stack.num_mlps * self._beside_mlp_s(part)
                seconds += self._gemm_s(part, stack.params) + beside_s + tasks_s
        return seconds

    @cached_property
    def _gating(self) -> tuple[tuple[Stack, float], ...]:
        """Stacks of layers, with the seconds that it takes to hand over gates of each."""
        launches, found = self.prices.launches.of_gates, list[tuple[Stack, float]]()
        for stack in self.prices.dense.stacks:
            number, of_gates = len(stack.layers), launches[stack.layers.start : stack.layers.stop]
            of_layer = (sum(of_gates) + self._adding * stack.num_moe) / number
            found.append((stack, number * self._task_s(of_layer)))
        return tuple(found)

    def _beside_mlp_s(self, load: PassLoad) -> float:
        """Norm and residual of experts or an MLP, and what several GPUs add up."""
        moved = self._norm_states / 2 * load.tokens
        return self._moving_s(moved) + self.shared_s(load)

    def combine_s(self) -> float:
        """What experts have made of a layer is added up, in a task of its own; no time where every
        micro-batch does so in `post`."""
        if self._is_paged:
            return 0.0
        is_joined = self.traits.runs == "pass"
        return self._task_s(self.prices.launches.of_combine(is_joined=is_joined))

    def expert_s(self, rows: float, *, fresh: float, is_mean: bool = False) -> float:
        """Work of an expert over so many tokens, which with the chance `fresh` has just arrived;
        its launches are `launching_s`.

        Args:
            is_mean: `rows` vary from expert to expert and are so many in the mean.
        """
        if rows <= 0:
            return 0.0
        moving_s = self._moving_s(choice_states(self.prices.shape) * rows)
        if not self.prices.is_cpu:
            return self.prices.expert_s(self.prices.main, rows) + moving_s
        compute, instructions = self.prices.dtypes.compute, self.prices.main.instruction_set
        if is_mean:
            padded = mean_product_rows(rows, compute, instructions)
        else:
            padded = product_rows(round(rows), compute, instructions)
        return self.prices.cpu_expert_s(self.prices.main, padded, fresh=fresh) + moving_s

    def launching_s(self, rows: Sequence[float]) -> float:
        """What it takes to hand over experts that are computed together, over so many tokens each,
        and to launch them, which on a CPU is a part of their rates; pages have no tasks for
        them."""
        chosen = [each for each in rows if each]
        handed_s = max(0, len(chosen) - 1) * self.prices.main.another_expert_s
        handed_s += 0.0 if self._is_paged else self.prices.main.task_s
        if self.prices.is_cpu or not self.prices.main.launch_s:
            return handed_s
        return self._launches_s(self.prices.launches.of_experts(chosen)) + handed_s

    def head_s(self, rows: float) -> float:
        """Logits after so many tokens, and what lies between the pass and the next. No task of its
        own: it ends the last layer of a pass."""
        between_s = self.prices.main.pass_s + rows * self.prices.main.row_s
        if not rows:
            return between_s
        prices = self.prices
        count = prices.launches.of_head * ceil(rows / prices.logits_rows)
        return between_s + prices.head_s(prices.main, rows) + self._launches_s(count)

    # --- weights --------------------------------------------------------------------------------

    def chunk_s(self, num_experts: float) -> float:
        """So many experts, or parts of such, on their way to where they are computed. A copy into
        pinned buffers runs beside the link, so the slower of the two counts."""
        if self.prices.top == "dram":
            return self.fetch_s(num_experts)
        handed_s = num_experts * self.prices.num_chunks * self.prices.main.task_s
        launched_s = self._launches_s(num_experts * self.prices.num_copies)
        return max(self.up_s(num_experts), self.stage_s(num_experts), handed_s + launched_s)

    def fetch_s(self, num_experts: float) -> float:
        """The same on their way from disk to main memory."""
        return self.prices.link_s("disk->dram", num_experts * self.prices.expert_bytes)

    def up_s(self, num_experts: float) -> float:
        """The same on their way from main memory to a GPU."""
        return self.prices.link_s("dram->vram", num_experts * self.prices.expert_bytes)

    def page_s(self, num_experts: float) -> float:
        """So many experts, or parts of such, on their way out of pinned buffers. What of them
        lives on disk under a GPU is read beside that."""
        return self.fetch_s(num_experts) if self.prices.top == "dram" else self.up_s(num_experts)

    def stage_s(self, num_experts: float) -> float:
        """The same on their way into pinned buffers."""
        return self.prices.staging_s(num_experts * self.prices.expert_bytes, self.policy)

    def block_s(self, num_experts: float) -> float:
        """So many experts in one piece, buffers and link in turns."""
        return max(self.page_s(num_experts), self.stage_s(num_experts))

    def layers_up_s(self, layers: Collection[int]) -> float:
        """Weights outside experts of some layers on their way to where they are computed."""
        num_bytes = sum(map(self.prices.layer_bytes, layers))
        moving_s = self.prices.link_s(self._link(Kind.LAYER_UP), num_bytes)
        return max(moving_s, len(layers) * self._task_s(1))

    # --- keys and values, hidden states ---------------------------------------------------------

    def off_s(self, load: PassLoad) -> float:
        """Queries, keys and values of decoding sequences go down."""
        num_bytes = self.prices.projected_bytes(load.decode_sequences)
        return self.prices.link_s("vram->dram", num_bytes)

    def load_s(self, load: PassLoad) -> float:
        """Results of the CPU's attention go up."""
        return self.prices.link_s("dram->vram", self.prices.attended_bytes(load.decode_sequences))

    def kv_s(self, kind: Kind, load: PassLoad) -> float:
        """Keys and values move one hop of their way; with hidden states of a static batch's prompts
        where they go to or from attention. What goes to a disk goes there in whole pages."""
        prices, link = self.prices, self._link(kind)
        if kind in TO_ATTENTION:
            num_bytes, sequences = prices.cached_bytes(load), load.resumed
        else:
            is_disk, sequences = link == "dram->disk", load.sequences
            num_bytes = prices.touched_bytes(load) if is_disk else prices.new_bytes(load)
        if kind in (Kind.KV_UP, Kind.KV_DOWN):
            num_bytes += self._hidden_bytes(load)
        return prices.link_s(link, num_bytes, prices.num_pieces(sequences))

    def _hidden_bytes(self, load: PassLoad) -> float:
        is_static = self.policy.batching == "static" and self.prices.top == "vram"
        return self.prices.hidden_bytes(load.prompt_tokens) if is_static else 0.0

    def _gemm_s(self, load: PassLoad, params: int) -> float:
        prices, rows = self.prices, self.policy.micro_batch_size
        return prices.dense_gemm_s(prices.main, load, params, rows)

    def _mixed_s(self, load: PassLoad, params: Mixed) -> float:
        """Products before attention or behind it, with what norm or residual move, in a mean
        layer."""
        if self.prices.shape.encoder is None:
            moving_s = self._moving_s(self._norm_states / 4 * load.tokens)
            return self._gemm_s(load, params.decoding) + moving_s
        share = self.prices.shape.num_encoding_layers / self.prices.shape.num_layers
        prompts, others = load.in_stack(encodes=True), load.in_stack(encodes=False)
        moved = share * prompts.tokens + (1 - share) * others.tokens
        gemm_s = self._gemm_s(prompts, params.encoding) + self._gemm_s(others, params.decoding)
        return gemm_s + self._moving_s(self._norm_states / 4 * moved)

    @cached_property
    def _norm_states(self) -> int:
        return norm_states(self.prices.shape)

    def _moving_s(self, hidden_states: float) -> float:
        return self.prices.moving_s(self.prices.main, hidden_states)

    def _task_s(self, num_launches: float) -> float:
        """A task of the lane that computes, its work left out."""
        return self.prices.main.task_s + self._launches_s(num_launches)

    def _launches_s(self, count: float) -> float:
        return count * self.prices.main.launch_s

    def _launching_s(self, kind: Kind, load: PassLoad) -> float:
        """Of a task; launches are not counted where they take no time."""
        launch_s = self.prices.main.launch_s
        return self.prices.launches.of_batch(kind, load) * launch_s if launch_s else 0.0

    @cached_property
    def _is_paged(self) -> bool:
        return self.traits.is_paged

    @cached_property
    def _adding(self) -> float:
        """Launches of `post` that a layer else has a task of its own for."""
        return self._is_paged * self.prices.launches.of_combine(is_joined=False)

    def _link(self, kind: Kind) -> LinkName:
        return cast(LinkName, lane_of(kind, self.prices.top).at)


KV_KINDS = frozenset({*TO_ATTENTION, *FROM_ATTENTION})
_TRANSFERS = KV_KINDS | {Kind.OFF, Kind.LOAD}
_OF_BATCH: Mapping[Kind, Callable[[TaskPrices, PassLoad], float]] = {
    Kind.ATTEND: TaskPrices.attend_s,
    Kind.PRE: TaskPrices.project_s,
    Kind.ATTN: TaskPrices.cpu_attention_s,
    Kind.OUT: TaskPrices.out_s,
    Kind.OFF: TaskPrices.off_s,
    Kind.LOAD: TaskPrices.load_s,
}
