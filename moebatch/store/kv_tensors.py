"""Memory for pages of keys and values, seen as rows, as pages or as bytes.

Shape letters: R cache rows (one token each), G KV heads, C head size, X units (pages or rows).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.checkpoint.direct import align_up
from moebatch.spec.policy import PAGE_TOKENS
from moebatch.store.memory import Arena


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShape:
    """What a token, and a page, of one layer take."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Keys of one token; its values take as much."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def half_bytes(self) -> int:
        """Keys of one page; its values take as much."""
        return PAGE_TOKENS * self.row_bytes


@dataclass(frozen=True, slots=True, eq=False)
class KvTensors:
    """Keys and values of one layer, or of one window."""

    keys_RGC: Tensor
    values_RGC: Tensor

    def units(self, unit_rows: int) -> Iterator[Tensor]:
        """Keys, then values, as [units, numbers of a unit], a unit being so many rows."""
        for tensor_RGC in (self.keys_RGC, self.values_RGC):
            num_rows, num_heads, head_dim = tensor_RGC.shape
            yield tensor_RGC.view(num_rows // unit_rows, unit_rows * num_heads * head_dim)

    def first(self, num_pages: int) -> "KvTensors":
        """Its first pages alone; no copies."""
        num_rows = num_pages * PAGE_TOKENS
        return KvTensors(self.keys_RGC[:num_rows], self.values_RGC[:num_rows])

    def buffers(self, first_page: int, num_pages: int) -> Iterator[memoryview]:
        """Keys and values of pages in turn, for system calls; main memory only."""
        keys_XB, values_XB = (pages_XN.view(torch.uint8) for pages_XN in self.units(PAGE_TOKENS))
        for page in range(first_page, first_page + num_pages):
            yield keys_XB[page].numpy().data
            yield values_XB[page].numpy().data


class KvRoom:
    """Memory on one device for a number of `KvTensors` of so many pages each, all zeros."""

    def __init__(
        self, shape: KvShape, count: int, num_pages: int, device: torch.device, *, pinned: bool
    ) -> None:
        half_bytes = num_pages * shape.half_bytes
        num_bytes = 2 * count * half_bytes
        self._shape = shape
        self._halves = [
            slice(start, start + half_bytes) for start in range(0, num_bytes, half_bytes)
        ]
        """Where keys, then values, of each of them lie that are not given back."""
        self._arena = Arena(num_bytes, pinned=pinned) if device.type == "cpu" else None
        if self._arena is not None:
            memory = self._arena.bytes
        else:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        size = (num_pages * PAGE_TOKENS, shape.num_kv_heads, shape.head_dim)
        halves = [memory[half].view(shape.dtype).view(size) for half in self._halves]
        self.tensors = [KvTensors(*halves[i : i + 2]) for i in range(0, 2 * count, 2)]

    def give_back(self, num_pages: int) -> int:
        """Gives back all but the first pages of its tensors, which are not read any more;
        returns the bytes that the system has back, those of whole pages of its own."""
        assert self._arena is not None, "memory of a device stays where it is"
        num_bytes = 0
        for place, half in enumerate(self._halves):
            stop = half.start + num_pages * self._shape.half_bytes
            num_bytes += self._arena.give_back(stop, half.stop)
            # What was too little to be given back may be enough next time.
            self._halves[place] = slice(half.start, min(half.stop, align_up(stop)))
        return num_bytes

    def close(self) -> None:
        """Unpins the memory."""
        if self._arena is not None:
            self._arena.unpin()
