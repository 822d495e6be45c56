"""What gates have seen, beside what they chose: the material that predictors learn from.

Hidden states are many bytes, so they lie in a file and are mapped layer by layer.

Shape letters: L MoE layers, N tokens of the trace, R rows, D hidden, K experts per token.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.predict.predictor import Chosen, PassTokens

MAX_TRACE_BYTES = 4 * 2**30
"""Tokens beyond that are not kept: a gate of a large model has seen enough by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Tokens with what each gate has seen of them, and what it chose."""

    hidden_LND: NDArray[np.float16]
    experts_LNK: NDArray[np.uint16]
    tokens_N: NDArray[np.int64]
    is_first_N: NDArray[np.bool_]
    """Tokens that do not follow the one before them in the same sequence."""

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.tokens_N)

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return len(self.experts_LNK)

    @property
    def followed_N(self) -> NDArray[np.intp]:
        """Tokens whose successor in their sequence is the next one."""
        return np.flatnonzero(~self.is_first_N[1:])


class HiddenTrace:
    """Tokens one behind the other, over passes. Filled as an observer of passes, then read."""

    def __init__(
        self,
        folder: Path,
        moe_layers: Sequence[int],
        *,
        hidden_size: int,
        experts_per_token: int,
        most_tokens: int,
    ) -> None:
        """Room for `most_tokens`, or as many as `MAX_TRACE_BYTES` hold, in a file without a name on
        the disk of `folder`, gone with this process. Raises OSError if there is no room."""
        self._position = {layer: position for position, layer in enumerate(moe_layers)}
        num_layers = len(self._position)
        fitting = MAX_TRACE_BYTES // (num_layers * hidden_size * np.dtype(np.float16).itemsize)
        self._most = max(1, min(most_tokens, fitting))
        size = (num_layers, self._most, hidden_size)
        with tempfile.TemporaryFile(dir=folder) as file:
            # A disk that is full later would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, prod(size) * np.dtype(np.float16).itemsize)
            self._hidden_LND = np.memmap(file, np.float16, "r+", shape=size)
        self._experts_LNK = np.zeros((num_layers, self._most, experts_per_token), np.uint16)
        self._tokens_N = np.zeros(self._most, np.int64)
        self._is_first_N = np.ones(self._most, np.bool_)
        self._begin = self._end = 0
        self._counts = [0] * num_layers
        """Rows of the pass in work that are kept, by layer."""

    def __len__(self) -> int:
        """Tokens of whole passes."""
        is_whole = all(count == self._end - self._begin for count in self._counts)
        return self._end if is_whole else self._begin

    @property
    def is_full(self) -> bool:
        """Whether later tokens are not kept."""
        return self._end == self._most

    # --- as an observer -------------------------------------------------------------------------

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        """A pass of so many tokens begins; one that was broken off is forgotten."""
        assert tokens is not None, "tokens are a part of the trace"
        self._begin = len(self)
        self._end = min(self._begin + num_rows, self._most)
        kept = self._end - self._begin
        self._tokens_N[self._begin : self._end] = tokens.tokens_T[:kept]
        self._is_first_N[self._begin : self._end] = tokens.is_first_T[:kept]
        self._counts = [0] * len(self._counts)

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: Tensor | None = None
    ) -> None:
        """The gate of `layer` has spoken for those rows."""
        assert hidden_RD is not None, "hidden states are a part of the trace"
        position = self._position[layer]
        first, last = (min(self._begin + row, self._end) for row in (rows.start, rows.stop))
        kept = last - first
        self._hidden_LND[position, first:last] = hidden_RD[:kept].cpu().to(torch.float16).numpy()
        self._experts_LNK[position, first:last] = experts_RK[:kept]
        self._counts[position] += kept

    def part(self, start: int, stop: int) -> Seen:
        """Some of the tokens of whole passes."""
        stop = min(stop, len(self))
        return Seen(
            hidden_LND=self._hidden_LND[:, start:stop],
            experts_LNK=self._experts_LNK[:, start:stop],
            tokens_N=self._tokens_N[start:stop],
            is_first_N=self._is_first_N[start:stop],
        )
