"""Weights that stay in memory: read once, converted to the compute dtype on the way.

Shape letters: E experts, D hidden, N tokens.
"""

from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES, DirectFile, align_up
from moebatch.checkpoint.index import Extent, Weight
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.checkpoint.record import TORCH_DTYPES
from moebatch.layout.buffers import DENSE_TERM
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.memory import Arena

_WINDOW_BYTES = 16 * 2**20
_ALIGNMENT = 64


class DenseLoader:
    """Fills one arena with weights, in `dtype`, through a small window."""

    def __init__(
        self,
        weights: Iterable[Weight],
        dtype: torch.dtype,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Room for `weights` in main memory, or in that of a device; DoesNotFit if it has none."""
        total = sum(dense_bytes(weight.shape, dtype) for weight in weights)
        self._dtype = dtype
        if memory is None:
            self._room = Arena(total).bytes
        else:
            self._room = memory.allocate(total, what=DENSE_TERM)
        self._used = 0
        self._window = Arena(_WINDOW_BYTES + PAGE_BYTES)
        self._files: dict[Path, DirectFile] = {}

    def load(self, weight: Weight) -> Tensor:
        """The weight as a matrix or a vector. Raises StorageError when reading fails."""
        num_bytes = prod(weight.shape) * self._dtype.itemsize
        room = self._room[self._used : self._used + num_bytes]
        tensor = room.view(self._dtype).view(weight.shape)
        self._used += dense_bytes(weight.shape, self._dtype)
        if weight.format.is_tiled:
            self._read_into(tensor, weight.extents[0])
        else:
            parts = [self._stored(extent) for extent in weight.extents]
            decoded = torch.empty(weight.shape, dtype=self._dtype)
            weight.format.decode(parts, decoded)
            tensor.copy_(decoded)
        return tensor

    def close(self) -> None:
        """Gives the files back; the weights stay."""
        for file in self._files.values():
            file.close()

    def _stored(self, extent: Extent) -> Tensor:
        return self._read_into(torch.empty(extent.shape, dtype=TORCH_DTYPES[extent.dtype]), extent)

    def _read_into(self, tensor: Tensor, extent: Extent) -> Tensor:
        """Reads the numbers at `extent`, converted to those of the tensor."""
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

    def _read(self, file: DirectFile, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        start = offset // PAGE_BYTES * PAGE_BYTES
        file.read(self._window.view(0, align_up(offset + num_bytes - start)), start)
        return self._window.tensor(offset - start, (num_bytes // dtype.itemsize,), dtype)


def dense_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Room of a weight of that shape in the arena when it is held in `dtype`."""
    return align_up(prod(shape) * dtype.itemsize, _ALIGNMENT)


def load_gates(files: ModelFiles) -> list[Tensor]:
    """The gates of all layers with experts, [E, D] each, without anything else."""
    return _loaded(
        [files.layer_weights(layer)["router"] for layer in files.shape.moe_layers], files.dtype
    )


def load_embedded(files: ModelFiles, tokens: Iterable[int]) -> Tensor:
    """What the model makes of each of these tokens, N, before its first layer, [N, D] in float16,
    without the rest of the vocabulary."""
    table = files.global_weights()["embedding"]
    return torch.cat(_loaded([table.row(token) for token in tokens], torch.float16))


def _loaded(weights: list[Weight], dtype: torch.dtype) -> list[Tensor]:
    loader = DenseLoader(weights, dtype)
    loaded = [loader.load(weight) for weight in weights]
    loader.close()
    return loaded
