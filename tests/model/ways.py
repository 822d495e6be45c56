"""Drivers that take the steps of a layer apart, as schedules do."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moebatch.model.attention.by_torch import Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.batch import MicroBatch
from tests.model.driver import Driver

SPARE_ROWS = 3
"""Rows that buffers have beyond those in use: no step may read them."""


class ApartDriver(Driver):
    """Attention in three parts; a gate for each micro-batch; experts over all that were joined."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        decoder = self.decoder
        self.core = AttentionCore(
            self.shape,
            self.limits,
            dtype=decoder.dtype,
            device=torch.device("cpu"),
            sink_scores=decoder.sink_scores,
        )

    def run_layers(self, x_TD: torch.Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        """Gates in an order of no meaning."""
        decoder = self.decoder
        for layer in range(self.shape.num_layers):
            for micro in micro_batches:
                qkv, out_THV = self.buffers(layer, micro)
                decoder.project(layer, x_TD, micro, qkv)
                self.attend(layer, qkv, micro, out_THV)
                decoder.add_attention(layer, x_TD, micro, out_THV)
            if not self.shape.is_moe(layer):
                for micro in micro_batches:
                    decoder.add_dense(layer, x_TD, rows_of(micro))
                continue
            routing = decoder.join(
                [decoder.route(layer, x_TD, rows_of(micro)) for micro in reversed(micro_batches)]
            )
            self.run_experts(layer, routing)
            decoder.combine(layer, x_TD, routing)

    def attend(self, layer: int, qkv: Qkv, micro: MicroBatch, out_THV: torch.Tensor) -> None:
        """What the core does, in whatever thread."""
        with torch.inference_mode():
            self.core.attend(layer, qkv, micro, self.cached[layer], out_THV)

    def buffers(self, layer: int, micro: MicroBatch) -> tuple[Qkv, torch.Tensor]:
        """Room for what goes to the core and for what comes back."""
        attention, rows = self.shape.attention_of(layer), micro.num_tokens + SPARE_ROWS

        def room(num_heads: int, head_dim: int) -> torch.Tensor:
            return torch.full((rows, num_heads, head_dim), torch.nan, dtype=self.decoder.dtype)

        q = room(attention.num_heads, attention.cached_key_dim)
        parts = (room(part.num_heads, part.head_dim) for part in attention.cached_parts.parts)
        return Qkv(q, tuple(parts)), room(attention.num_heads, attention.cached_value_dim)


class CgoPipeDriver(ApartDriver):
    """The core in a thread of its own; a micro-batch goes on to the next layer as soon as it can,
    while those behind it are still in the last one."""

    def run_layers(self, x_TD: torch.Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        """Experts run over one micro-batch."""
        with ThreadPoolExecutor(max_workers=1) as lane:
            attended = [self._begin(lane, 0, x_TD, micro) for micro in micro_batches]
            for layer in range(self.shape.num_layers):
                for number, micro in enumerate(micro_batches):
                    self.decoder.add_attention(layer, x_TD, micro, attended[number].result())
                    self._finish(layer, x_TD, rows_of(micro))
                    if layer + 1 < self.shape.num_layers:
                        attended[number] = self._begin(lane, layer + 1, x_TD, micro)

    def _begin(
        self, lane: ThreadPoolExecutor, layer: int, x_TD: torch.Tensor, micro: MicroBatch
    ) -> "Future[torch.Tensor]":
        qkv, out_THV = self.buffers(layer, micro)
        self.decoder.project(layer, x_TD, micro, qkv)

        def attend() -> torch.Tensor:
            self.attend(layer, qkv, micro, out_THV)
            return out_THV

        return lane.submit(attend)

    def _finish(self, layer: int, x_TD: torch.Tensor, rows: slice) -> None:
        if not self.shape.is_moe(layer):
            self.decoder.add_dense(layer, x_TD, rows)
            return
        routing = self.decoder.route(layer, x_TD, rows)
        self.run_experts(layer, routing)
        self.decoder.combine(layer, x_TD, routing)


def rows_of(micro: MicroBatch) -> slice:
    """The rows of the pass that the micro-batch has."""
    return slice(micro.start, micro.stop)
