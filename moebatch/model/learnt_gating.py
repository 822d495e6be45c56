"""What a calibration has found out about leaving out experts of a model."""

from collections.abc import Mapping
from dataclasses import dataclass

from moebatch.model.gating import AdaptiveGating


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
        """The point of the threshold."""
        return next(point for point in self.curve if point.threshold == self.threshold)

    def loss(self, point: GatingPoint) -> float:
        """By how much perplexity grows there, as a share of the exact one."""
        return point.perplexity / self.curve[0].perplexity - 1
