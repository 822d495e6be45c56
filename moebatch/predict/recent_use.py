"""How often experts have been used of late: what is known of a layer before anything else is.

Shape letters: R rows, E experts.
"""

from typing import TYPE_CHECKING

import numpy as np

from moebatch.arrays import Bools, Floats
from moebatch.predict.predictor import Chosen, PassTokens, RoutingObserver

if TYPE_CHECKING:
    from torch import Tensor

_LASTING = 0.5
"""What a pass counts for when the next one is over. Of answers of the built-in model, experts that
were chosen in the last pass alone come again with a chance of 0.33, those of the last two of 0.50:
less than is said here, in the same proportion."""


def after_pass(before: Floats, is_chosen: Bools) -> Floats:
    """The share of passes in which each expert was chosen, with one pass more; 0..1."""
    return _LASTING * before + (1 - _LASTING) * is_chosen


class RecentUse(RoutingObserver):
    """The share of passes in which each expert was chosen, recent ones weighing most."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._before: dict[int, Floats] = {}
        """By layer, up to the last pass, [E]."""
        self._now: dict[int, Bools] = {}
        """What has been chosen in this one, [E]."""

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        for layer in self._now:
            self._before[layer] = self.chances(layer)
        self._now.clear()

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: "Tensor | None" = None
    ) -> None:
        now_E = self._now.setdefault(layer, np.zeros(self._num_experts, np.bool_))
        now_E[experts_RK.reshape(-1)] = True

    def chances(self, layer: int) -> Floats:
        """With what chance each expert is used when its layer's turn comes, [E]."""
        before_E = self._before.get(layer, np.zeros(self._num_experts))
        if layer not in self._now:
            return before_E
        return after_pass(before_E, self._now[layer])
