"""Weights that stay in memory: read once, converted to the compute dtype on the way."""

from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moebatch.store.checkpoint import Extent
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.direct import DirectFile
from moebatch.store.memory import PAGE_BYTES, Arena, align_up
from moebatch.store.record import TORCH_DTYPES

_WINDOW_BYTES = 16 * 2**20
_ALIGNMENT = 64


class DenseLoader:
    """Fills one arena with tensors, in `dtype`, through a small window."""

    def __init__(
        self,
        extents: Iterable[Extent],
        dtype: torch.dtype,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Room for `extents` in main memory, or in that of a device; DoesNotFit if it has none."""
        total = sum(dense_bytes(extent, dtype) for extent in extents)
        self._dtype = dtype
        if memory is None:
            self._room = Arena(total).bytes
        else:
            self._room = memory.allocate(total, what="weights outside experts")
        self._used = 0
        self._window = Arena(_WINDOW_BYTES + PAGE_BYTES)
        self._files: dict[Path, DirectFile] = {}

    def load(self, extent: Extent) -> Tensor:
        """The tensor at `extent`. Raises StorageError when reading fails."""
        num_bytes = prod(extent.shape) * self._dtype.itemsize
        room = self._room[self._used : self._used + num_bytes]
        tensor = room.view(self._dtype).view(extent.shape)
        self._used += dense_bytes(extent, self._dtype)
        file = self._files.get(extent.path)
        if file is None:
            file = self._files[extent.path] = DirectFile(extent.path)
        stored, flat, done = TORCH_DTYPES[extent.dtype], tensor.view(-1), 0
        while done < extent.num_bytes:
            num_bytes = min(_WINDOW_BYTES, extent.num_bytes - done)
            source = self._read(file, extent.offset + done, num_bytes, stored)
            first = done // stored.itemsize
            flat[first : first + source.numel()].copy_(source)
            done += num_bytes
        return tensor

    def close(self) -> None:
        """Gives the files back; the tensors stay."""
        for file in self._files.values():
            file.close()

    def _read(self, file: DirectFile, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        start = offset // PAGE_BYTES * PAGE_BYTES
        file.read(self._window.view(0, align_up(offset + num_bytes - start)), start)
        return self._window.tensor(offset - start, (num_bytes // dtype.itemsize,), dtype)


def dense_bytes(extent: Extent, dtype: torch.dtype) -> int:
    """Room of the tensor at `extent` in the arena when it is held in `dtype`."""
    num_elements = extent.num_bytes // TORCH_DTYPES[extent.dtype].itemsize
    return align_up(num_elements * dtype.itemsize, _ALIGNMENT)
