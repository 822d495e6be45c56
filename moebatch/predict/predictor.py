"""What a predictor of experts is asked, and what it is shown.

Shape letters: T tokens of the pass, R rows of a micro-batch, D hidden, E experts, K experts per
token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moebatch.arrays import Bools, Floats, Ints

if TYPE_CHECKING:
    from torch import Tensor

Chosen = NDArray[np.integer]
"""Experts that each of some tokens has chosen at one layer, [R, K]; of a token with fewer, the
first one is shown in the place of those that are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTokens:
    """What is known of a pass before its first layer."""

    tokens_T: Ints
    """The token of each row."""
    requests_T: Ints
    """The request that it belongs to, by its index."""
    choices_T: Ints
    """Which one of its request's answers it belongs to."""
    positions_T: Ints
    """Its position in its sequence."""
    is_first_T: Bools
    """Rows that do not follow the row before them in the same sequence."""
    is_last_T: Bools
    """Rows behind which the next token of their sequence is not known yet."""
    embedded_TD: "Tensor | None" = None
    """What the model makes of them before its first layer, valid until that begins."""


class RoutingObserver:
    """Is shown what the gates of a pass have chosen."""

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        """A pass of so many tokens begins; what was observed before belongs to an earlier one.

        A pass that is broken off ends with the next call.
        """

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: "Tensor | None" = None
    ) -> None:
        """The gate of `layer` has chosen for those rows, counted among the rows of the pass that go
        through it; `hidden_RD` is what it saw, valid during the call.

        Row r is the same token in all layers of a pass, but for those of an encoder. Micro-batches
        of a layer come one behind the other, the first rows first; those of several layers may take
        turns.
        """


class Predictor(RoutingObserver, ABC):
    """Says which experts of a MoE layer will probably be chosen, from what it has observed.

    Rows whose gate has chosen at that layer count as what they chose, so a layer that is behind
    the pass ranks its experts as they were chosen; for those rows it is the best guess for the
    next pass. The other rows are predicted.
    """

    def rank(self, layer: int) -> list[int]:
        """All experts of the layer, the likeliest to be chosen first; of equals the more frequent,
        then by number."""
        ranked: list[int] = np.lexsort((-self.frequency(layer), -self.expected(layer))).tolist()
        return ranked

    @abstractmethod
    def frequency(self, layer: int) -> Floats:
        """How often each expert has been chosen in all, [E]."""

    @abstractmethod
    def expected(self, layer: int) -> Floats:
        """How many tokens of the pass are expected to choose each expert, [E].

        They sum to T times K, where T are the tokens of the pass for which this is a guess.
        """

    @abstractmethod
    def is_guess(self, layer: int) -> bool:
        """Whether `expected` goes by what is known of tokens that have not chosen there yet, of
        this pass or of the next, and not only by what others have chosen."""


def counts_of(experts_RK: Chosen, num_experts: int) -> Floats:
    """How many of some tokens have chosen each expert, [E]."""
    first_R1, others = experts_RK[:, :1], experts_RK[:, 1:]
    chosen = np.append(first_R1, others[others != first_R1])
    return np.bincount(chosen, minlength=num_experts).astype(np.float64)
