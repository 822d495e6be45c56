"""Memory for pages of keys and values, seen as rows, as pages or as bytes.

Shape letters: R cache rows (one token each, or the state of one sequence), X units (pages or rows),
N numbers of a unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moebatch.checkpoint.direct import align_up
from moebatch.spec.model.cache_layout import CacheLayout, CachePart
from moebatch.spec.policy.policy import PAGE_TOKENS
from moebatch.store.memory import Arena


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShape:
    """What a row, and a page, of one layer take."""

    cache: CacheLayout
    dtype: torch.dtype
    page_rows: int = PAGE_TOKENS

    @property
    def row_bytes(self) -> int:
        """One row, all parts."""
        return self.cache.token_bytes(self.dtype.itemsize)

    @property
    def page_bytes(self) -> int:
        """One page, all parts."""
        return self.page_rows * self.row_bytes

    def part_bytes(self, part: CachePart) -> int:
        """One page of a part."""
        return self.page_rows * part.token_bytes(self.dtype.itemsize)

    def stored_as(self, part: CachePart) -> tuple[torch.dtype, int]:
        """What a token's numbers at one head are stored as, and how many of these: bytes where the
        cache has 8 bits, codes first and then the scale."""
        kinds = {None: self.dtype, "float32": torch.float32, "float16": torch.float16}
        dtype = kinds.get(part.dtype, torch.uint8)
        return dtype, part.head_bytes(self.dtype.itemsize) // dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class KvTensors:
    """What is cached of one layer, or in one window."""

    parts: tuple[Tensor, ...]
    """As the `CacheLayout` has them, [R, heads, head size] each, or uint8 and as many as
    `CachePart.head_bytes` says."""

    def units(self, unit_rows: int) -> Iterator[Tensor]:
        """Each part as [units, numbers of a unit], a unit being so many rows."""
        for part in self.parts:
            num_rows, num_heads, head_dim = part.shape
            yield part.view(num_rows // unit_rows, unit_rows * num_heads * head_dim)

    def first(self, num_rows: int) -> "KvTensors":
        """Its first rows alone; no copies."""
        return KvTensors(tuple(part[:num_rows] for part in self.parts))


class KvRoom:
    """Memory on one device for a number of `KvTensors` of so many pages each, all zeros."""

    def __init__(
        self, shape: KvShape, count: int, num_pages: int, device: torch.device, *, pinned: bool
    ) -> None:
        num_bytes = count * num_pages * shape.page_bytes
        self._arena = Arena(num_bytes, pinned=pinned) if device.type == "cpu" else None
        if self._arena is not None:
            memory = self._arena.bytes
        else:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._page_bytes = [shape.part_bytes(part) for part in shape.cache.parts] * count
        stops = list(accumulate(num_pages * page_bytes for page_bytes in self._page_bytes))
        self._places = list(map(slice, [0, *stops], stops))
        """Where the parts of each of them lie that are not given back."""
        rows, each = num_pages * shape.page_rows, len(shape.cache.parts)
        parts = [
            _as_rows(memory[place], rows, part.num_heads, *shape.stored_as(part))
            for place, part in zip(self._places, shape.cache.parts * count, strict=True)
        ]
        self.tensors = [KvTensors(tuple(parts[i : i + each])) for i in range(0, len(parts), each)]

    def give_back(self, num_pages: int) -> int:
        """Gives back all but the first pages of its tensors, which are not read any more;
        returns the bytes that the system has back, those of whole pages of its own."""
        assert self._arena is not None, "memory of a device stays where it is"
        num_bytes = 0
        for number, (place, page_bytes) in enumerate(
            zip(self._places, self._page_bytes, strict=True)
        ):
            stop = place.start + num_pages * page_bytes
            num_bytes += self._arena.give_back(stop, place.stop)
            # What was too little to be given back may be enough next time.
            self._places[number] = slice(place.start, min(place.stop, align_up(stop)))
        return num_bytes

    def close(self) -> None:
        """Unpins the memory."""
        if self._arena is not None:
            self._arena.unpin()


def _as_rows(
    memory_B: Tensor, num_rows: int, num_heads: int, dtype: torch.dtype, width: int
) -> Tensor:
    return memory_B.view(dtype).view(num_rows, num_heads, width)
