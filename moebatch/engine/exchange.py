"""Attention that the CPU computes beside a GPU, micro-batch by micro-batch, and what goes between
them.

Shape letters: N rows of the largest micro-batch, H query heads, V size of a head of values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.model.attention import Qkv
from moebatch.model.attention_core import AttentionCore
from moebatch.schedule.attention import LOOK_AHEAD
from moebatch.spec.shape import ModelShape

NUM_BUFFERS = LOOK_AHEAD + 1
"""Micro-batches that are on their way at once: those ahead, and the one being finished."""


@dataclass(frozen=True, slots=True)
class ExchangeBuffers:
    """One micro-batch on both sides: projections go down, results of attention come up."""

    qkv: Qkv
    out_NHV: Tensor
    host_qkv: Qkv
    host_out_NHV: Tensor

    def off(self, num_tokens: int) -> None:
        """Copies the projections down."""
        for source, target in zip(self.qkv.tensors, self.host_qkv.tensors, strict=True):
            target[:num_tokens].copy_(source[:num_tokens], non_blocking=True)

    def load(self, num_tokens: int) -> None:
        """Copies the results up."""
        self.out_NHV[:num_tokens].copy_(self.host_out_NHV[:num_tokens], non_blocking=True)


class CpuAttention:
    """What the CPU attends with, and a ring of buffers on the device and in main memory."""

    def __init__(
        self,
        core: AttentionCore,
        shape: ModelShape,
        *,
        num_rows: int,
        dtype: torch.dtype,
        on_device: Callable[[tuple[int, ...]], Tensor],
        pinned: bool,
    ) -> None:
        """`on_device` allocates at the level of the GPU; `pinned` is for a real one."""
        attention = shape.attention
        query = (num_rows, attention.num_heads, attention.cached_key_dim)
        result = (num_rows, attention.num_heads, attention.cached_value_dim)
        parts = [(num_rows, part.num_heads, part.head_dim) for part in attention.cached_parts.parts]

        def on_host(size: tuple[int, ...]) -> Tensor:
            return torch.empty(size, dtype=dtype, pin_memory=pinned)

        self.core = core
        self.load_bytes = attention.result_width * dtype.itemsize
        """Of a token, that come up."""
        self.off_bytes = attention.sent_width * dtype.itemsize
        """Of a token, that go down."""
        self._ring = [
            ExchangeBuffers(
                Qkv(on_device(query), tuple(map(on_device, parts))),
                on_device(result),
                Qkv(on_host(query), tuple(map(on_host, parts))),
                on_host(result),
            )
            for _ in range(NUM_BUFFERS)
        ]

    def buffers(self, number: int) -> ExchangeBuffers:
        """Those of the micro-batch of that number."""
        return self._ring[number % NUM_BUFFERS]
