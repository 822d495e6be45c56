"""Attention that the CPU computes beside a GPU, micro-batch by micro-batch, and what goes between
them.

Shape letters: N rows of the largest micro-batch, H query heads, V size of a head of values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from moebatch.model.attention.by_torch import Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.schedule.steps.attention import LOOK_AHEAD
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.shape import ModelShape

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
        self.core = core
        self._itemsize = dtype.itemsize
        self._attentions = [shape.attention_of(layer) for layer in range(shape.num_layers)]
        room = num_rows * max(each.sent_width + each.result_width for each in shape.attentions)
        self._ring = []
        for _ in range(NUM_BUFFERS):
            rooms = on_device((room,)), torch.empty(room, dtype=dtype, pin_memory=pinned)
            self._ring.append(shape.by_layer(partial(_buffers, rooms, num_rows)))

    def buffers(self, number: int, layer: int) -> ExchangeBuffers:
        """Those of the micro-batch of that number in a layer."""
        return self._ring[number % NUM_BUFFERS][layer]

    def token_bytes(self, layer: int, *, is_up: bool) -> int:
        """Of a token, that come up or go down."""
        attention = self._attentions[layer]
        return (attention.result_width if is_up else attention.sent_width) * self._itemsize


def _buffers(rooms: tuple[Tensor, Tensor], num_rows: int, attention: Attention) -> ExchangeBuffers:
    """Views of flat rooms on either side, as layers that attend so need them."""
    heads = attention.num_heads
    parts = [(part.num_heads, part.head_dim) for part in attention.cached_parts.parts]
    sizes = [
        (heads, attention.cached_key_dim),
        *parts,
        (heads, attention.cached_value_dim),
    ]
    stops = [num_rows * width for width in accumulate(prod(size) for size in sizes)]
    places = [*zip([0, *stops], stops, sizes, strict=False)]
    (q, *kv, out), (host_q, *host_kv, host_out) = (
        [room[start:stop].view(num_rows, *size) for start, stop, size in places] for room in rooms
    )
    return ExchangeBuffers(Qkv(q, tuple(kv)), out, Qkv(host_q, tuple(host_kv)), host_out)
