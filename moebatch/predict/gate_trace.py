"""What gates say of the tokens of a text, in files that outlive a process that is broken off.

Hidden states are many bytes, so they are mapped, and written layer by layer.

Shape letters: L MoE layers, N tokens of the text, R some of them, D hidden, K experts per token.
"""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.advance import Advance
from moebatch.arrays import Ints
from moebatch.journal.files import storage_errors, take_room
from moebatch.predict.predictor import Chosen, PassTokens, RoutingObserver

MAX_HIDDEN_BYTES = 4 * 2**30
"""Hidden states of tokens beyond that are not kept: a gate of a large model has seen enough."""
PlacesOf = Callable[[PassTokens], Ints]
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

    def checksum(self, places: range) -> int:
        """Stands for everything that is kept at those places."""
        found = 0
        for array in (self.experts_LNK, self.hidden_LND):
            for of_layer in array[:, places.start : places.stop]:
                found = crc32(of_layer, found)
        return found


class GateRecorder(RoutingObserver):
    """Works on a portion of a trace at a time.

    What a pass says of tokens outside it was kept before; what was said of a token in a pass that
    is broken off is said again.
    """

    def __init__(
        self,
        trace: GateTrace,
        moe_layers: Sequence[int],
        places_of: PlacesOf,
        advance: Advance,
    ) -> None:
        """`places_of` knows the places of a pass's tokens, [T]; `advance` gets the share of the
        trace, 0 to 1, that is kept."""
        self._trace = trace
        self._position = {layer: position for position, layer in enumerate(moe_layers)}
        self._places_of = places_of
        self._advance = advance
        self._places_T = np.zeros(0, np.int64)
        self.begin(range(0))

    def begin(self, portion: range) -> None:
        """From now on passes are about these places."""
        self._portion = portion
        self._is_put_LP = np.zeros((len(self._position), len(portion)), np.bool_)
        self._num_put = 0

    @property
    def is_whole(self) -> bool:
        """Whether all gates have chosen for all tokens of the portion."""
        return bool(self._is_put_LP.all())

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        assert tokens is not None, "tokens have places"
        self._places_T = self._places_of(tokens)

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: Tensor | None = None
    ) -> None:
        assert hidden_RD is not None, "hidden states are a part of the trace"
        position, places_R = self._position[layer], self._places_T[rows]
        first, last = self._portion.start, self._portion.stop
        is_ours_R = (places_R >= first) & (places_R < last)
        ours = places_R[is_ours_R]
        self._trace.experts_LNK[position, ours] = experts_RK[is_ours_R]
        if self._trace.num_hidden:
            hidden = hidden_RD.cpu().to(torch.float16).numpy()[is_ours_R]
            is_kept_R = ours < self._trace.num_hidden  # as far as there is room
            self._trace.hidden_LND[position, ours[is_kept_R]] = hidden[is_kept_R]
        self._is_put_LP[position, ours - first] = True
        self._num_put += len(ours)
        num_tokens = self._trace.experts_LNK.shape[1]
        done = self._portion.start + self._num_put / len(self._position)
        self._advance(min(done, self._portion.stop) / num_tokens)


def _mapped(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array in a file, made anew unless there is one of that size."""
    num_bytes = prod(shape) * dtype.itemsize
    if not num_bytes:
        return np.zeros(shape, dtype)
    with storage_errors(path, needed=num_bytes), path.open("ab") as file:
        if file.tell() != num_bytes:
            file.truncate(0)
        try:
            # A disk that is full later would end the process without a word.
            take_room(file.fileno(), num_bytes)
        except OSError:
            path.unlink()
            raise
        return np.memmap(path, dtype, "r+", shape=shape)
