"""Attention that the CPU computes beside a GPU, micro-batch by micro-batch, and what goes between
them.

Shape letters: N rows of the largest micro-batch, H query heads, G KV heads, C head size.
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
    out_NHC: Tensor
    host_qkv: Qkv
    host_out_NHC: Tensor

    def off(self, num_tokens: int) -> None:
        """Copies the projections down."""
        for source, target in zip(self.qkv, self.host_qkv, strict=True):
            target[:num_tokens].copy_(source[:num_tokens], non_blocking=True)

    def load(self, num_tokens: int) -> None:
        """Copies the results up."""
        self.out_NHC[:num_tokens].copy_(self.host_out_NHC[:num_tokens], non_blocking=True)


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
        query = (num_rows, shape.num_heads, shape.head_dim)
        kv = (num_rows, shape.num_kv_heads, shape.head_dim)

        def on_host(size: tuple[int, ...]) -> Tensor:
            return torch.empty(size, dtype=dtype, pin_memory=pinned)

        self.core = core
        self.load_bytes = shape.num_heads * shape.head_dim * dtype.itemsize
        """Of a token, that come up."""
        self.off_bytes = self.load_bytes + 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        """Of a token, that go down."""
        self._ring = [
            ExchangeBuffers(
                Qkv(on_device(query), on_device(kv), on_device(kv)),
                on_device(query),
                Qkv(on_host(query), on_host(kv), on_host(kv)),
                on_host(query),
            )
            for _ in range(NUM_BUFFERS)
        ]

    def buffers(self, number: int) -> ExchangeBuffers:
        """Those of the micro-batch of that number."""
        return self._ring[number % NUM_BUFFERS]
