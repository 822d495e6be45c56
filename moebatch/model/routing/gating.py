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


class GatingCount:
    """Counts decisions of gates, a token at a layer each, and what was left of them.

    The sums stay where the gates are computed until they are asked for: a GPU does not wait for
    them.
    """

    def __init__(self) -> None:
        self.num_decisions = 0
        self._left_out_K: Tensor | None = None

    def add(self, is_left_out_RK: Tensor) -> None:
        """More decisions. Choices that are left out are the last ones of their rows."""
        self.num_decisions += len(is_left_out_RK)
        left_out_K = is_left_out_RK.sum(dim=0)
        if self._left_out_K is None:
            self._left_out_K = left_out_K
        else:
            self._left_out_K.add_(left_out_K)

    @property
    def single_share(self) -> float:
        """Decisions for a single expert among all, 0..1; 0 before the first one."""
        left_out = self._left_out
        if not left_out:
            return 0.0
        return 1.0 if len(left_out) == 1 else left_out[1] / self.num_decisions

    @property
    def mean_experts(self) -> float:
        """Experts of a decision in the mean; 0 before the first one."""
        left_out = self._left_out
        return len(left_out) - sum(left_out) / self.num_decisions if left_out else 0.0

    @property
    def _left_out(self) -> list[int]:
        """By choice, how often it was left out."""
        return [] if self._left_out_K is None else self._left_out_K.tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class GatingPoint:
    """What a threshold costs and saves, on text that nothing was learnt from."""

    threshold: float
    perplexity: float
    single_share: float
    """Decisions for a single expert among those of all tokens at all layers, 0..1."""
    mean_experts: float
    """Experts of a decision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearntGating:
    """How much layers matter, what thresholds do, and the one that was chosen."""

    sensitivities: Mapping[int, float]
    """Of each MoE layer: the sum of the diagonal of its Fisher matrix (AdapMoE, Eq. 6)."""
    curve: tuple[GatingPoint, ...]
    """By ascending threshold; the first one is 0, which is exact."""
    wanted_loss: float
    """By how much perplexity might grow, as a share of the exact one."""
    threshold: float
    """The largest one found for that; 0 where every other one costs more."""

    @property
    def gating(self) -> AdaptiveGating:
        """The rule with that threshold."""
        return AdaptiveGating(self.threshold, self.sensitivities)

    @property
    def chosen(self) -> GatingPoint:
        return next(point for point in self.curve if point.threshold == self.threshold)

    def loss(self, point: GatingPoint) -> float:
        """By how much perplexity grows there, as a share of the exact one."""
        return point.perplexity / self.curve[0].perplexity - 1
