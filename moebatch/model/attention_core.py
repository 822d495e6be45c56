"""Attention between its projections, on a device of its own choosing.

Shape letters: T tokens of the micro-batch, S positions, H query heads, G KV heads, C head size,
R rows of the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebatch.layout.scratch import Limits, attention_core_elements
from moebatch.model.attention import LayerKv, Qkv, attend
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
        self._rows_size = (limits.kv_rows, shape.num_kv_heads, shape.head_dim)
        self._windows = shape.sliding_windows
        self._cached_in = shape.attention.cache_dtype
        self._helpers = Helpers(torch_parallel())
        self._scratch = Scratch(attention_core_elements(shape, limits), device=device, dtype=dtype)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return self._scratch.buffer.nbytes

    def attend(
        self,
        layer: int,
        qkv: Qkv,
        micro_batch: MicroBatch,
        keys_RGC: Tensor,
        values_RGC: Tensor,
        out_THC: Tensor,
    ) -> None:
        """Writes new keys and values into the layer's cache, and attention into `out_THC`.

        All tensors, and what the micro-batch plans for attention, are on the device of the core.
        `qkv` and `out_THC` may have more rows than the micro-batch; those are left alone.
        """
        q_THC, k_TGC, v_TGC = qkv.first(micro_batch.num_tokens)
        frame = self._scratch.frame()
        sink_scores_H = self._sink_scores[layer] if self._sink_scores else None
        kv = LayerKv(
            keys_RGC=keys_RGC,
            values_RGC=values_RGC,
            gathered_keys_SGC=frame.take(*self._rows_size),
            gathered_values_SGC=frame.take(*self._rows_size),
            cached_in=self._cached_in,
        )
        kv.write(micro_batch.new_rows[self._windows[layer]], k_TGC, v_TGC)
        for plan in micro_batch.plans[self._windows[layer]]:
            sinks = None
            if plan.sight.num_sinks:
                assert micro_batch.turns is not None, "queries turn where there are sinks"
                turned_THC = _turned(frame, q_THC, micro_batch.turns)
                sinks = SinkQueries(plan.sight.num_sinks, turned_THC)
            out = out_THC[: micro_batch.num_tokens]
            attend(q_THC, k_TGC, v_TGC, plan, kv, out, sinks, sink_scores_H)
            if plan.singles is not None:
                self._attend_singles(plan.singles, q_THC, kv, out_THC, sinks, sink_scores_H)
            if plan.slices is not None:
                window = plan.sight.window
                self._attend_slices(plan.slices, q_THC, kv, out_THC, window, sinks, sink_scores_H)

    def _attend_singles(
        self,
        singles: SingleQueries,
        q_THC: Tensor,
        kv: LayerKv,
        out_THC: Tensor,
        sinks: SinkQueries | None,
        sink_scores_H: Tensor | None,
    ) -> None:
        """Where the plan leaves tokens to the compiled kernel."""
        seen_bytes = 2 * len(singles.rows_N) * kv.keys_RGC[0].nbytes
        num_threads = torch.get_num_threads() if seen_bytes >= _LEAST_SHARED_BYTES else 1
        q_THC = q_THC.contiguous()
        work = work_of(
            singles,
            q_THC,
            kv.keys_RGC,
            kv.values_RGC,
            out_THC,
            num_threads=num_threads,
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
        out_THC: Tensor,
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
            kv.keys_RGC,
            kv.values_RGC,
            out_THC,
            window=window,
            num_threads=num_threads,
            cached_in=kv.cached_in,
            sinks=sinks,
            sink_scores_H=sink_scores_H,
        )
        self._run(_kernels().attend_slices, work, num_threads)

    def _run(self, kernel: Kernel, work: Work | SliceWork, num_threads: int) -> None:
        self._helpers.run(kernel, work, num_threads)
        if work.has_failed:
            raise MemoryError("no memory for the scratch of attention")


def _turned(frame: Frame, q_THC: Tensor, turns: SinkTurns) -> Tensor:
    turned_THC = frame.take(*q_THC.shape).copy_(q_THC)
    rotate(turned_THC, turns.cos_TR, turns.sin_TR)
    return turned_THC


def _kernels() -> Kernels:
    kernels = loader.kernels()
    assert kernels is not None, "a plan for a kernel is made where there is one"
    return kernels
