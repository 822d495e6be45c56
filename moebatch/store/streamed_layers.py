"""Weights outside experts that come up layer by layer, and what is below them."""

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import numpy as np
from torch import Tensor

from moebatch.checkpoint.direct import align_up
from moebatch.layout.buffers import DENSE_TERM
from moebatch.layout.footprint import ROOM_OF_TENSOR
from moebatch.schedule.setup import NUM_LAYER_PLACES
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.memory import Arena, copy_bytes
from moebatch.store.scratch_file import LayerPages, PageRuns, ScratchFile

_WHOLE = PageRuns.of(np.array([0]), np.array([0]))
"""The one page of a layer."""


class StreamedLayers:
    """Layers that take a few places in turns where everything is computed.

    Below a GPU they live in main memory, else in a scratch file, as they are computed with:
    converted, decoded and joined. When a layer is brought is its caller's business.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        memory: DeviceMemory,
        *,
        folder: Path | None = None,
        pinned: bool = False,
    ) -> None:
        """`sizes` are bytes of layers, whole blocks of a file, in their order. `folder` is for the
        scratch file.

        Raises DoesNotFit and StorageError where there is no room.
        """
        self._sizes = sizes
        self._number = {layer: number for number, layer in enumerate(sizes)}
        self._opened = ExitStack()
        largest = max(sizes.values())
        self._places = [
            memory.allocate(largest, what=DENSE_TERM)
            for _ in range(min(NUM_LAYER_PLACES, len(sizes)))
        ]
        self._file: ScratchFile | None = None
        self._below: dict[int, Tensor] = {}
        if memory.level == "vram":
            arena = Arena(sum(sizes.values()), pinned=pinned)
            self._opened.callback(arena.unpin)
            for layer, end in zip(sizes, accumulate(sizes.values()), strict=True):
                self._below[layer] = arena.bytes[end - sizes[layer] : end]
        else:
            assert folder is not None, "layers on disk need a folder"
            pages = [LayerPages(1, (num_bytes,)) for num_bytes in sizes.values()]
            self._file = ScratchFile(folder, pages, what=DENSE_TERM)
            self._opened.callback(self._file.close)

    def __contains__(self, layer: object) -> bool:
        return layer in self._sizes

    def num_bytes(self, layer: int) -> int:
        """What is moved of a layer."""
        return self._sizes[layer]

    def store(self, layer: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Takes the weights of a layer in main memory, by role, and returns them as they are to be
        computed with: in its place, once it has been brought."""
        place = self._place(layer)
        room = self._below.get(layer, place)
        for role, laid in _laid_out(room, weights).items():
            laid.copy_(weights[role])
        if self._file is not None:
            self._file.write(self._number[layer], _WHOLE, [place[None]])
        return _laid_out(place, weights)

    def bring(self, layer: int) -> None:
        """Fills the place of a layer. Raises StorageError when reading fails."""
        place = self._place(layer)
        if self._file is not None:
            self._file.read(self._number[layer], _WHOLE, [place[None]])
        else:
            copy_bytes(place, self._below[layer])

    def close(self) -> None:
        """Gives back what lives below."""
        self._opened.close()

    def _place(self, layer: int) -> Tensor:
        place = self._places[self._number[layer] % NUM_LAYER_PLACES]
        return place[: self._sizes[layer]]


def _laid_out(room: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors like these in bytes, one after the other."""
    found, offset = dict[str, Tensor](), 0
    for role, weight in weights.items():
        end = offset + weight.nbytes
        found[role] = room[offset:end].view(weight.dtype).view(weight.shape)
        offset = align_up(end, ROOM_OF_TENSOR)
    return found
