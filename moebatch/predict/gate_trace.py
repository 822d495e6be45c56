"""What gates say of the tokens of a text, in files that outlive a process that is broken off.

Hidden states are many bytes, so they are mapped, and written layer by layer.

Shape letters: L MoE layers, N tokens of the text, R some of them, D hidden, K experts per token.
"""

import os
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from moebatch.journal.files import told
from moebatch.predict.predictor import Chosen

MAX_HIDDEN_BYTES = 4 * 2**30
"""Hidden states of tokens beyond that are not kept: a gate of a large model has seen enough."""
_HIDDEN, _EXPERTS = np.dtype(np.float16), np.dtype(np.uint16)


class GateTrace:
    """Each token has a place, counted from 0."""

    def __init__(
        self,
        folder: Path,
        *,
        num_layers: int,
        num_tokens: int,
        experts_per_token: int,
        hidden_size: int,
    ) -> None:
        """Goes on with the files of `folder` if they are of that size.

        A `hidden_size` of 0 keeps nothing of what gates see. Raises StorageError if there is no
        room for everything.
        """
        token_bytes = num_layers * hidden_size * _HIDDEN.itemsize
        most = min(num_tokens, max(1, MAX_HIDDEN_BYTES // token_bytes)) if hidden_size else 0
        experts, hidden = (num_tokens, experts_per_token), (most, hidden_size)
        self.experts_LNK: NDArray[np.uint16] = _mapped(
            folder / "experts", _EXPERTS, (num_layers, *experts)
        )
        self.hidden_LND: NDArray[np.float16] = _mapped(
            folder / "hidden", _HIDDEN, (num_layers, *hidden)
        )

    @property
    def num_hidden(self) -> int:
        """Tokens, the first ones, of which is kept what gates see."""
        return int(self.hidden_LND.shape[1])

    def put_choices(self, position: int, places_R: NDArray[np.integer], experts_RK: Chosen) -> None:
        """Keeps what the gate of a layer, by its position, has chosen for some tokens."""
        self.experts_LNK[position, places_R] = experts_RK

    def put_hidden(
        self, position: int, places_R: NDArray[np.integer], hidden_RD: NDArray[np.float16]
    ) -> None:
        """Keeps what it has seen of them, as far as there is room."""
        is_kept_R = places_R < self.num_hidden
        self.hidden_LND[position, places_R[is_kept_R]] = hidden_RD[is_kept_R]

    def checksum(self, places: range) -> int:
        """Stands for everything that is kept at those places."""
        found = 0
        for array in (self.experts_LNK, self.hidden_LND):
            for of_layer in array[:, places.start : places.stop]:
                found = crc32(of_layer, found)
        return found


def _mapped(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array in a file, made anew unless there is one of that size."""
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return np.zeros(shape, dtype)
    with told(path, needed=num_bytes), path.open("ab") as file:
        if file.tell() != num_bytes:
            file.truncate(0)
        try:
            # A disk that is full later would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError:
            path.unlink()
            raise
        return np.memmap(path, dtype, "r+", shape=shape)
