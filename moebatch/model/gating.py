"""Gates that use fewer experts than the model says where that hardly matters (AdapMoE).

Shape letters: R rows, K experts per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdaptiveGating:
    """Leaves out the least weighty experts of a token as long as that changes the loss by little.

    Without the experts of a set D the loss changes by about (sum of their weights)^2 times the
    layer's sensitivity, weights being those of a token divided by their sum; the rule with two
    experts is Eq. 7 and 8 of the paper, with more of them D grows from the smallest weight on.
    """

    threshold: float
    """T, the same in all layers. 0 leaves nothing out."""
    sensitivities: Mapping[int, float]
    """Of each layer: the sum of the diagonal of its Fisher matrix."""

    def limit(self, layer: int) -> float:
        """Weights that may be left out, together; of a token's weights that sum to one."""
        sensitivity = self.sensitivities[layer]
        if self.threshold <= 0:
            return 0.0
        return 1.0 if sensitivity <= self.threshold else sqrt(self.threshold / sensitivity)

    def least_thresholds(self, layer: int, weights_RK: Tensor) -> Tensor:
        """The least T at which each choice but a token's first one is left out, [R, K-1].

        `weights_RK` are in descending order.
        """
        total_R1 = weights_RK.sum(dim=-1, keepdim=True)
        return (_rest(weights_RK)[:, 1:] / total_R1).square() * self.sensitivities[layer]

    def drop(self, layer: int, weights_RK: Tensor, experts_RK: Tensor, num_experts: int) -> None:
        """Puts 0 in the place of weights that are left out, in place, and `num_experts` in that of
        their experts. The others of the token sum to what all of them did.

        `weights_RK` are in descending order, as `choose_experts` gives them.
        """
        limit = self.limit(layer)
        if limit <= 0:
            return
        total_R1 = weights_RK.sum(dim=-1, keepdim=True)
        is_dropped_RK = _rest(weights_RK) <= limit * total_R1
        is_dropped_RK[:, 0] = False
        weights_RK.masked_fill_(is_dropped_RK, 0.0)
        kept_R1 = weights_RK.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights_RK.mul_(total_R1 / kept_R1)
        experts_RK.masked_fill_(is_dropped_RK, num_experts)


def _rest(weights_RK: Tensor) -> Tensor:
    """Of each choice, the weight of it and of all behind it."""
    return weights_RK.flip(-1).cumsum(-1).flip(-1)
