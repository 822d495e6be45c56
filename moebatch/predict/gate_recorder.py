"""Observes passes, and puts what gates say into the places of a trace.

Shape letters: L MoE layers, T tokens of a pass, P places of a portion, R rows, D hidden, K experts
per token.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.predict.gate_trace import GateTrace
from moebatch.predict.predictor import Chosen, PassTokens

PlacesOf = Callable[[PassTokens], NDArray[np.int64]]


class GateRecorder:
    """Works on a portion of a trace at a time.

    What a pass says of tokens outside it was kept before; what was said of a token in a pass that
    is broken off is said again.
    """

    def __init__(
        self,
        trace: GateTrace,
        moe_layers: Sequence[int],
        places_of: PlacesOf,
        advance: Callable[[float], None],
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
        """A pass of so many tokens begins."""
        assert tokens is not None, "tokens have places"
        self._places_T = self._places_of(tokens)

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: Tensor | None = None
    ) -> None:
        """The gate of `layer` has chosen for those rows."""
        assert hidden_RD is not None, "hidden states are a part of the trace"
        position, places_R = self._position[layer], self._places_T[rows]
        first, last = self._portion.start, self._portion.stop
        is_ours_R = (places_R >= first) & (places_R < last)
        ours = places_R[is_ours_R]
        self._trace.put_choices(position, ours, experts_RK[is_ours_R])
        if self._trace.num_hidden:
            hidden = hidden_RD.cpu().to(torch.float16).numpy()
            self._trace.put_hidden(position, ours, hidden[is_ours_R])
        self._is_put_LP[position, ours - first] = True
        self._num_put += len(ours)
        self._tell()

    def _tell(self) -> None:
        num_tokens = self._trace.experts_LNK.shape[1]
        done = self._portion.start + self._num_put / len(self._position)
        self._advance(min(done, self._portion.stop) / num_tokens)
