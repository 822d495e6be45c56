"""What goes between a GPU and the attention that the CPU computes for it, micro-batch by
micro-batch.

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
class _Buffers:
    """One micro-batch on both sides."""

    qkv: Qkv
    out_NHC: Tensor
    host_qkv: Qkv
    host_out_NHC: Tensor


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """What the CPU beside a GPU attends with."""

    core: AttentionCore
    exchange: "Exchange"


class Exchange:
    """A ring of buffers on the device and in main memory."""

    def __init__(
        self,
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

        self._ring = [
            _Buffers(
                Qkv(on_device(query), on_device(kv), on_device(kv)),
                on_device(query),
                Qkv(on_host(query), on_host(kv), on_host(kv)),
                on_host(query),
            )
            for _ in range(NUM_BUFFERS)
        ]

    def qkv(self, number: int) -> Qkv:
        """Where the projections of the micro-batch of that number go."""
        return self._of(number).qkv

    def host_qkv(self, number: int) -> Qkv:
        """The same in main memory."""
        return self._of(number).host_qkv

    def out(self, number: int) -> Tensor:
        """Results of its attention on the device."""
        return self._of(number).out_NHC

    def host_out(self, number: int) -> Tensor:
        """The same in main memory."""
        return self._of(number).host_out_NHC

    def off(self, number: int, num_tokens: int) -> None:
        """Copies the projections down."""
        buffers = self._of(number)
        for source, target in zip(buffers.qkv, buffers.host_qkv, strict=True):
            target[:num_tokens].copy_(source[:num_tokens], non_blocking=True)

    def load(self, number: int, num_tokens: int) -> None:
        """Copies the results up."""
        buffers = self._of(number)
        buffers.out_NHC[:num_tokens].copy_(buffers.host_out_NHC[:num_tokens], non_blocking=True)

    def _of(self, number: int) -> _Buffers:
        return self._ring[number % NUM_BUFFERS]


def off_bytes(shape: ModelShape, num_tokens: int, itemsize: int) -> int:
    """Bytes that `Exchange.off` moves."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return num_tokens * heads * shape.head_dim * itemsize


def load_bytes(shape: ModelShape, num_tokens: int, itemsize: int) -> int:
    """Bytes that `Exchange.load` moves."""
    return num_tokens * shape.num_heads * shape.head_dim * itemsize
