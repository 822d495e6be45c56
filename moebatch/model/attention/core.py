"""Attention between its projections, on a device of its own choosing.

Shape letters: T tokens of the micro-batch, S positions, H query heads, G KV heads, C head size,
V that of values, R rows of the cache.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from moebatch.layout.scratch import Limits, attention_core_elements, chosen_per_token
from moebatch.model.attention.by_torch import LayerKv, Parts, Qkv, attend, attend_prompt
from moebatch.model.attention.plan import AttentionPlan, ExpandedSlices
from moebatch.model.batch import MicroBatch, WindowPlan
from moebatch.model.gpu.attention import attend_single
from moebatch.model.gpu.loader import attends_single
from moebatch.model.native import loader
from moebatch.model.native.attention_work import (
    Cached,
    QuerySlices,
    SingleQueries,
    has_whole_rows,
    work_of,
)
from moebatch.model.native.kernels import threads_for
from moebatch.model.native.scoring import Scoring, SinkQueries
from moebatch.model.rope import rotate
from moebatch.model.scratch import Frame, Scratch
from moebatch.spec.model.shape import ModelShape

_LEAST_SHARED_BYTES = 2**19
"""Keys and values that one thread has read before another one would be awake."""
_LEAST_SHARED_PAIRS = 2**16
"""Pairs of a query at a head and a position: the same of slices."""


Expand = Callable[[Tensor], Iterator[tuple[slice, Parts]]]
"""Of what is cached of positions, [S, G, C]: heads, some after the others, with their keys and
values, [S, heads, head size] each, valid until the next ones."""


class AttentionCore:
    """Appends to the cache and attends to it. Needs no weights but a few scores.

    It owns its scratch: a thread may use it while another one uses a decoder or another core.
    """

    def __init__(
        self,
        shape: ModelShape,
        limits: Limits,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sink_scores: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """`sink_scores` [H] are those of layers, as `DenseWeights.sink_scores` has them."""
        self.device = device
        self._sink_scores = {
            layer: scores_H.to(device, torch.float32) for layer, scores_H in sink_scores.items()
        }
        self._num_rows = limits.kv_rows
        self._attentions = [shape.attention_of(layer) for layer in range(shape.num_layers)]
        self._layouts = shape.by_layer(lambda attention: attention.cached_parts)
        self._windows = shape.sliding_windows
        self._on_gpu = attends_single(shape, device)
        self._scratch = Scratch(attention_core_elements(shape, limits), device=device, dtype=dtype)
        choosing = chosen_per_token(shape.attention)
        self._heads_choosing = choosing.num_heads
        of_pass = (limits.pass_tokens, choosing.num_heads, choosing.num_blocks)
        self._choices_TGK = torch.empty(of_pass, dtype=torch.int32, device=device)
        size = (choosing.num_rooms, limits.micro_batch_tokens, choosing.num_rows)
        self._chosen_rows = torch.empty(size, dtype=torch.int64, device=device)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        chosen = self._choices_TGK.nbytes + self._chosen_rows.nbytes
        return self._scratch.buffer.nbytes + chosen

    def plan_of(self, layer: int, micro_batch: MicroBatch) -> WindowPlan:
        if self._attentions[layer].most_chosen is not None:
            assert micro_batch.choosing is not None, "planned where layers choose"
            return micro_batch.choosing
        return micro_batch.by_window[self._windows[layer]]

    def choices(self, micro_batch: MicroBatch) -> Tensor:
        """Blocks of positions that each token attends to which chooses, [T, heads, K] in ascending
        order, for each head that chooses by itself, until others of the same rows of a pass are
        written there: layers may share them."""
        return self._choices_TGK[micro_batch.start : micro_batch.stop]

    def layer_kv(
        self, layer: int, parts: Parts, frame: Frame | None = None, *, first: int = 0
    ) -> LayerKv:
        """What a layer caches, `parts`, of which `first` is the number of the first one; what is
        read of it is in a frame of the core, a new one if none is given."""
        attention, frame = self._attentions[layer], frame or self._scratch.frame()
        described = self._layouts[layer].parts[first : first + len(parts)]
        sizes = ((self._num_rows, part.num_heads, part.head_dim) for part in described)
        return LayerKv(
            parts=parts,
            rooms=tuple(frame.take(*size) for size in sizes),
            value_dim=attention.cached_value_dim,
            cached_in=attention.cache_dtype,
        )

    def attend(
        self,
        layer: int,
        qkv: Qkv,
        micro_batch: MicroBatch,
        parts: Parts,
        out_THV: Tensor,
    ) -> None:
        """Writes what is new into the layer's cache, `parts`, and attention to what is cached into
        `out_THV`. Rows of slices that are expanded are left alone.

        All tensors, and what the micro-batch plans for attention, are on the device of the core.
        `qkv` and `out_THV` may have more rows than the micro-batch; those are left alone.
        """
        qkv, frame = qkv.first(micro_batch.num_tokens), self._scratch.frame()
        kv, out_THV = self.layer_kv(layer, parts, frame), out_THV[: micro_batch.num_tokens]
        planned = self.plan_of(layer, micro_batch)
        kv.write(planned.new_rows_T, qkv.parts)
        for plan in planned.plans:
            scoring = self._scoring(layer, qkv.q_THC, micro_batch, plan.sight.num_sinks, frame)
            self._attend_planned(plan, qkv, kv, out_THV, scoring)
        if planned.choosing:
            scoring = self._scoring(layer, qkv.q_THC, micro_batch, 0, frame)
            self._attend_chosen(planned, self.choices(micro_batch), qkv, kv, out_THV, scoring)

    def _attend_planned(
        self, plan: AttentionPlan, qkv: Qkv, kv: LayerKv, out_THV: Tensor, scoring: Scoring
    ) -> None:
        attend(qkv, plan, kv, out_THV, scoring)
        for seen in (plan.singles, plan.slices):
            self._attend_seen(seen, qkv.q_THC, kv.cached, out_THV, scoring)

    def _attend_chosen(
        self,
        planned: WindowPlan,
        choices_TGK: Tensor,
        qkv: Qkv,
        kv: LayerKv,
        out_THV: Tensor,
        scoring: Scoring,
    ) -> None:
        """Each head of keys that chooses by itself attends to what it has chosen."""
        num_choosing = self._heads_choosing
        num_heads, num_kv_heads = qkv.q_THC.shape[1], kv.parts[0].shape[1]
        for head in range(num_choosing):
            own, cached = (
                slice(head * count // num_choosing, (head + 1) * count // num_choosing)
                for count in (num_heads, num_kv_heads)
            )
            plan = planned.chosen(choices_TGK[:, head], self._chosen_rows)
            of_heads = Qkv(qkv.q_THC[:, own], tuple(part[:, cached] for part in qkv.parts))
            out_THM, scoring_M = out_THV[:, own], scoring.of_heads(own)
            self._attend_planned(plan, of_heads, kv.of_heads(cached), out_THM, scoring_M)

    def attend_expanded(
        self,
        layer: int,
        q_THC: Tensor,
        micro_batch: MicroBatch,
        parts: Parts,
        expand: Expand,
        out_THV: Tensor,
    ) -> None:
        """Attention of the slices that are expanded, after `attend`, to what `expand` makes of what
        is cached of them."""
        scale, scores_H = self._attentions[layer].scale, self._sink_scores.get(layer)
        for plan in self.plan_of(layer, micro_batch).plans:
            for batch in plan.expanded:
                cached, _ = self.layer_kv(layer, parts).read(batch.rows)
                for heads, (keys, values) in expand(cached):
                    of_heads = None if scores_H is None else scores_H[heads]
                    made, scoring = Cached(keys, values), Scoring(scale, None, of_heads)
                    q_THM, out_THM = q_THC[:, heads], out_THV[:, heads]
                    self._attend_made(q_THM, made, batch, plan, out_THM, scoring)

    def _attend_made(
        self,
        q_THC: Tensor,
        made: Cached,
        batch: ExpandedSlices,
        plan: AttentionPlan,
        out_THV: Tensor,
        scoring: Scoring,
    ) -> None:
        for prompt in batch.prompts:
            q, out = q_THC[prompt.tokens], out_THV[prompt.tokens]
            seen = made.keys_RGC[prompt.rows], made.values_RGV[prompt.rows]
            attend_prompt(q, seen, prompt, plan, out, scoring)
        self._attend_seen(batch.slices, q_THC, made, out_THV, scoring)

    def _scoring(
        self, layer: int, q_THC: Tensor, micro_batch: MicroBatch, num_sinks: int, frame: Frame
    ) -> Scoring:
        attention, sinks = self._attentions[layer], None
        if num_sinks:
            turns, turned_THC = micro_batch.turns, frame.take(*q_THC.shape).copy_(q_THC)
            assert turns is not None, "queries turn where there are sinks"
            rotate(turned_THC[..., attention.rotated_from :], turns.cos_TR, turns.sin_TR)
            sinks = SinkQueries(num_sinks, turned_THC)
        return Scoring(attention.scale, sinks, self._sink_scores.get(layer))

    def _attend_seen(
        self,
        seen: SingleQueries | QuerySlices | None,
        q_THC: Tensor,
        cached: Cached,
        out_THV: Tensor,
        scoring: Scoring,
    ) -> None:
        """Where the plan leaves tokens, or slices of them, to a kernel."""
        if seen is None:
            return
        q_THC = q_THC if has_whole_rows(q_THC) else q_THC.contiguous()
        if self._on_gpu and isinstance(seen, SingleQueries):
            attend_single(seen, q_THC, cached, out_THV, scoring)
            return
        kernels = loader.kernels()
        assert kernels is not None, "a plan for a kernel is made where there is one"
        if isinstance(seen, SingleQueries):
            kernel, num_bytes = kernels.attend[cached.number], len(seen.rows_N) * cached.row_bytes
            num_threads = threads_for(num_bytes, _LEAST_SHARED_BYTES)
        else:
            kernel, num_pairs = kernels.attend_slices, seen.num_pairs * q_THC.shape[1]
            num_threads = threads_for(num_pairs, _LEAST_SHARED_PAIRS)
        work = work_of(seen, q_THC, cached, out_THV, scoring, num_threads=num_threads)
        kernel(work, num_threads)
        if work.has_failed:
            raise MemoryError("no memory for the scratch of attention")
