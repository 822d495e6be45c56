"""Weights that stay in memory: read once, converted to the compute dtype on the way.

Shape letters: E experts, D hidden, N tokens.
"""

from collections.abc import Iterable
from contextlib import closing
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES, DirectFile, align_up
from moebatch.checkpoint.header import Extent
from moebatch.checkpoint.index import Weight
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.checkpoint.record import TORCH_DTYPES
from moebatch.errors import CheckpointError
from moebatch.formats.weight_format import BadParts
from moebatch.layout.buffers import DENSE_TERM
from moebatch.layout.footprint import ROOM_OF_TENSOR
from moebatch.quoting import shown
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.memory import Arena

_WINDOW_BYTES = 16 * 2**20


class TensorReader:
    """Reads parts of weights through a small window, past the page cache."""

    def __init__(self, window_bytes: int = _WINDOW_BYTES) -> None:
        """`window_bytes` are read at a time."""
        self._window = Arena(window_bytes + PAGE_BYTES)
        self._window_bytes = window_bytes
        self._files: dict[Path, DirectFile] = {}

    def parts(self, weight: Weight) -> list[Tensor]:
        """The tensors of a weight as they are stored. Raises StorageError when reading fails."""
        return [
            self.read_into(torch.empty(extent.shape, dtype=TORCH_DTYPES[extent.dtype]), extent)
            for extent in weight.extents
        ]

    def read_into(self, tensor: Tensor, extent: Extent) -> Tensor:
        """Reads the numbers at `extent`, converted to those of the tensor."""
        file = self._files.get(extent.path)
        if file is None:
            file = self._files[extent.path] = DirectFile(extent.path)
        file.require(extent.offset + extent.num_bytes)
        stored, flat, done = TORCH_DTYPES[extent.dtype], tensor.view(-1), 0
        while done < extent.num_bytes:
            num_bytes = min(self._window_bytes, extent.num_bytes - done)
            source = self._read(file, extent.offset + done, num_bytes, stored)
            first = done // stored.itemsize
            flat[first : first + source.numel()].copy_(source)
            done += num_bytes
        return tensor

    def close(self) -> None:
        """Gives the files back."""
        for file in self._files.values():
            file.close()

    def _read(self, file: DirectFile, offset: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        start = offset // PAGE_BYTES * PAGE_BYTES
        file.read(self._window.view(0, align_up(offset + num_bytes - start)), start)
        return self._window.tensor(offset - start, (num_bytes // dtype.itemsize,), dtype)


class DenseLoader:
    """Fills one arena with weights through a small window."""

    def __init__(
        self, weights: Iterable[tuple[Weight, torch.dtype]], memory: DeviceMemory | None = None
    ) -> None:
        """Room for weights that are to have these types, in main memory or in that of a device;
        DoesNotFit if it has none."""
        total = sum(dense_bytes(weight.shape, dtype) for weight, dtype in weights)
        if memory is None:
            self._room = Arena(total).bytes
        else:
            self._room = memory.allocate(total, what=DENSE_TERM)
        self._used = 0
        self._reader = TensorReader()

    def load(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """The weight as a matrix or a vector. Raises StorageError when reading fails."""
        num_bytes = prod(weight.shape) * dtype.itemsize
        room = self._room[self._used : self._used + num_bytes]
        tensor = room.view(dtype).view(weight.shape)
        self._used += dense_bytes(weight.shape, dtype)
        if weight.format.is_tiled:
            self._reader.read_into(tensor, weight.extents[0])
        else:
            self._decode_into(tensor, weight)
        if weight.is_turned:
            return tensor.view(weight.shape[::-1]).copy_(tensor.mT.clone())
        return tensor

    def close(self) -> None:
        """Gives the files back; the weights stay."""
        self._reader.close()

    def _decode_into(self, tensor: Tensor, weight: Weight) -> None:
        """A few rows at a time, as far as the format keeps rows apart."""
        row_bytes = prod(weight.shape[1:]) * tensor.itemsize
        step = max(1, _WINDOW_BYTES // max(1, row_bytes * weight.step)) * weight.step
        for start in range(0, weight.shape[0], step):
            rows = range(start, min(start + step, weight.shape[0]))
            part = weight.rows(rows)
            decoded = torch.empty(part.shape, dtype=tensor.dtype)
            try:
                weight.format.decode(self._reader.parts(part), decoded)
            except BadParts as error:
                raise _damaged(weight, str(error)) from None
            if not decoded.isfinite().all():
                raise _damaged(weight, "scales or codes stand for NaN or infinity")
            tensor[start : rows.stop].copy_(decoded)


def _damaged(weight: Weight, why: str) -> CheckpointError:
    path = weight.extents[0].path
    return CheckpointError(f"{path}: the weight {shown(weight.name)} is damaged: {why}")


def dense_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Room of a weight of that shape in the arena when it is held in `dtype`."""
    return align_up(prod(shape) * dtype.itemsize, ROOM_OF_TENSOR)


def load_gates(files: ModelFiles, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The gates of all layers with experts, by role, without anything else; what corrects their
    choice in float32, and so the norms of gates that have their own, and of experts beside them."""
    dtypes = {"router": dtype, "router_bias": dtype, "router_correction": torch.float32}
    if files.shape.router.has_own_norm:
        dtypes |= dict.fromkeys(("router_norm", "mlp_norm"), torch.float32)
    layers = [files.layer_weights(layer) for layer in files.shape.moe_layers]
    roles = [[role for role in dtypes if role in of] for of in layers]
    wanted = [
        (of[role], dtypes[role]) for of, own in zip(layers, roles, strict=True) for role in own
    ]
    loaded = iter(_loaded(wanted))
    return [{role: next(loaded) for role in own} for own in roles]


def load_embedded(files: ModelFiles, tokens: Iterable[int]) -> Tensor:
    """What the model makes of each of these tokens, N, before its first layer, [N, D] in float16,
    without the rest of the vocabulary."""
    table = files.global_weights()["embedding"]
    step, num_rows = table.step, table.shape[0]
    places = [divmod(token, step) for token in tokens]
    starts = [block * step for block, _ in places]
    weights = [table.rows(range(start, min(start + step, num_rows))) for start in starts]
    loaded = _loaded([(weight, torch.float16) for weight in weights])
    taken = [rows[row] for rows, (_, row) in zip(loaded, places, strict=True)]
    return torch.stack(taken).mul_(files.shape.embedding_scale)


def _loaded(weights: list[tuple[Weight, torch.dtype]]) -> list[Tensor]:
    with closing(DenseLoader(weights)) as loader:
        return [loader.load(*weight) for weight in weights]
