"""Attention between its projections, on a device of its own choosing.

Shape letters: T tokens of the micro-batch, S positions, H query heads, G KV heads, C head size,
V that of values, R rows of the cache.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moebatch.layout.scratch import Limits, attention_core_elements
from moebatch.model.attention import LayerKv, Parts, Qkv, attend, attend_prompt
from moebatch.model.attention_plan import AttentionPlan, ExpandedSlices
from moebatch.model.batch import MicroBatch, SinkTurns
from moebatch.model.native import loader
from moebatch.model.native.helpers import Helpers, torch_parallel
from moebatch.model.native.kernels import Kernel, Kernels
from moebatch.model.native.query_slices import (
    QuerySlices,
    SliceWork,
    has_whole_rows,
    slice_work_of,
)
from moebatch.model.native.single_queries import SingleQueries, Work, work_of
from moebatch.model.native.sink_queries import SinkQueries
from moebatch.model.rope import rotate
from moebatch.model.scratch import Frame, Scratch
from moebatch.spec.shape import ModelShape

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
        sink_scores: Sequence[Tensor] = (),
    ) -> None:
        """`sink_scores` [H] are those of each layer, as `DenseWeights.sink_scores` has them."""
        self.device = device
        self._sink_scores = [scores_H.to(device, torch.float32) for scores_H in sink_scores]
        self._num_rows = limits.kv_rows
        self._attentions = [shape.attention_of(layer) for layer in range(shape.num_layers)]
        self._windows = shape.sliding_windows
        self._helpers = Helpers(torch_parallel())
        self._scratch = Scratch(attention_core_elements(shape, limits), device=device, dtype=dtype)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return self._scratch.buffer.nbytes

    def layer_kv(self, layer: int, parts: Parts, frame: Frame | None = None) -> LayerKv:
        """What a layer caches, `parts`; what is read of it is in a frame of the core, a new one if
        none is given."""
        attention, frame = self._attentions[layer], frame or self._scratch.frame()
        return LayerKv(
            parts=parts,
            rooms=tuple(
                frame.take(self._num_rows, part.num_heads, part.head_dim)
                for part in attention.cache.parts
            ),
            value_dim=attention.cached_value_dim,
            scale=attention.scale,
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
        sink_scores_H = self._sink_scores[layer] if self._sink_scores else None
        kv, attention = self.layer_kv(layer, parts, frame), self._attentions[layer]
        kv.write(micro_batch.new_rows[self._windows[layer]], qkv.parts)
        for plan in self._plans(layer, micro_batch):
            sinks = None
            if plan.sight.num_sinks:
                assert micro_batch.turns is not None, "queries turn where there are sinks"
                turned_THC = _turned(frame, qkv.q_THC, micro_batch.turns, attention.rotated_from)
                sinks = SinkQueries(plan.sight.num_sinks, turned_THC)
            out = out_THV[: micro_batch.num_tokens]
            attend(qkv, plan, kv, out, sinks, sink_scores_H)
            if plan.singles is not None:
                self._attend_singles(plan.singles, qkv.q_THC, kv, out_THV, sinks, sink_scores_H)
            if plan.slices is not None:
                window = plan.sight.window
                self._attend_slices(
                    plan.slices, qkv.q_THC, kv, out_THV, window, sinks, sink_scores_H
                )

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
        for plan in self._plans(layer, micro_batch):
            for batch in plan.expanded:
                as_cached = self.layer_kv(layer, parts)
                cached, _ = as_cached.read(batch.rows)
                for heads, made in expand(cached):
                    kv = LayerKv(parts=made, rooms=(), value_dim=0, scale=as_cached.scale)
                    self._attend_made(q_THC[:, heads], kv, batch, plan, out_THV[:, heads])

    def _attend_made(
        self,
        q_THC: Tensor,
        kv: LayerKv,
        batch: ExpandedSlices,
        plan: AttentionPlan,
        out_THV: Tensor,
    ) -> None:
        keys, values = kv.cached
        for prompt in batch.prompts:
            q, out, rows = q_THC[prompt.tokens], out_THV[prompt.tokens], prompt.rows
            attend_prompt(q, keys[rows], values[rows], prompt, plan, out, kv.scale)
        if batch.slices is not None:
            self._attend_slices(batch.slices, q_THC, kv, out_THV, plan.sight.window, None, None)

    def _plans(self, layer: int, micro_batch: MicroBatch) -> tuple[AttentionPlan, ...]:
        return micro_batch.plans[self._windows[layer]]

    def _attend_singles(
        self,
        singles: SingleQueries,
        q_THC: Tensor,
        kv: LayerKv,
        out_THV: Tensor,
        sinks: SinkQueries | None,
        sink_scores_H: Tensor | None,
    ) -> None:
        """Where the plan leaves tokens to the compiled kernel."""
        seen_bytes = len(singles.rows_N) * sum(part[0].nbytes for part in kv.parts)
        num_threads = torch.get_num_threads() if seen_bytes >= _LEAST_SHARED_BYTES else 1
        q_THC = q_THC.contiguous()
        work = work_of(
            singles,
            q_THC,
            *kv.cached,
            out_THV,
            num_threads=num_threads,
            scale=kv.scale,
            cached_in=kv.cached_in,
            sinks=sinks,
            sink_scores_H=sink_scores_H,
        )
        self._run(_kernels().attend, work, num_threads)

    def _attend_slices(
        self,
        slices: QuerySlices,
        q_THC: Tensor,
        kv: LayerKv,
        out_THV: Tensor,
        window: int | None,
        sinks: SinkQueries | None,
        sink_scores_H: Tensor | None,
    ) -> None:
        """Where the plan leaves slices to the compiled kernel."""
        shared = slices.num_pairs * q_THC.shape[1] >= _LEAST_SHARED_PAIRS
        num_threads = torch.get_num_threads() if shared else 1
        q_THC = q_THC if has_whole_rows(q_THC) else q_THC.contiguous()
        work = slice_work_of(
            slices,
            q_THC,
            *kv.cached,
            out_THV,
            window=window,
            num_threads=num_threads,
            scale=kv.scale,
            cached_in=kv.cached_in,
            sinks=sinks,
            sink_scores_H=sink_scores_H,
        )
        self._run(_kernels().attend_slices, work, num_threads)

    def _run(self, kernel: Kernel, work: Work | SliceWork, num_threads: int) -> None:
        self._helpers.run(kernel, work, num_threads)
        if work.has_failed:
            raise MemoryError("no memory for the scratch of attention")


def _turned(frame: Frame, q_THC: Tensor, turns: SinkTurns, rotated_from: int) -> Tensor:
    turned_THC = frame.take(*q_THC.shape).copy_(q_THC)
    rotate(turned_THC[..., rotated_from:], turns.cos_TR, turns.sin_TR)
    return turned_THC


def _kernels() -> Kernels:
    kernels = loader.kernels()
    assert kernels is not None, "a plan for a kernel is made where there is one"
    return kernels
