"""What gates cost that leave out what hardly matters.

Shape letters: N choices, R rows, K experts per token.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import exp

import torch
from torch import Tensor

from moebatch.model.routing.gating import AdaptiveGating, GatingCount, GatingPoint
from moebatch.training.reading import Reading, num_expected, reading_batches
from moebatch.training.whole_model import WholeModel

_DIGITS = 4
"""Of a threshold that a user may want to type."""


class GatingTrial:
    """Tries thresholds on texts."""

    def __init__(
        self,
        model: WholeModel,
        readings: Sequence[Reading],
        sensitivities: dict[int, float],
        num_experts: int,
    ) -> None:
        """`model` computes experts one by one."""
        self._model = model
        self._batches = list(reading_batches(readings))
        self._num_expected = num_expected(readings)
        self._sensitivities = sensitivities
        self._num_experts = num_experts

    def measure(self, share: float) -> GatingPoint:
        """What the threshold does at which exact gates would leave out such a share, 0..1, of all
        choices that can be left out."""
        all_N = self._least_thresholds_N
        place = round(share * len(all_N))
        least = float(all_N[place - 1]) if place else 0.0
        return self.at(float(f"{least:.{_DIGITS}g}"))

    def at(self, threshold: float) -> GatingPoint:
        """What a threshold does."""
        gating, count = AdaptiveGating(threshold, self._sensitivities), GatingCount()

        def drop(is_text_R: Tensor, layer: int, weights_RK: Tensor, experts_RK: Tensor) -> None:
            gating.drop(layer, weights_RK, experts_RK, self._num_experts)
            count.add(experts_RK[is_text_R] == self._num_experts)

        return GatingPoint(
            threshold=threshold,
            perplexity=exp(self._loss(drop)),
            single_share=count.single_share,
            mean_experts=count.mean_experts,
        )

    @cached_property
    def _least_thresholds_N(self) -> Tensor:
        """Of all choices that can be left out, the least threshold that does so; ascending."""
        gating, found = AdaptiveGating(0.0, self._sensitivities), []

        def look(is_text_R: Tensor, layer: int, weights_RK: Tensor, experts_RK: Tensor) -> None:
            found.append(gating.least_thresholds(layer, weights_RK[is_text_R]).flatten())

        self._loss(look)
        return torch.cat(found).sort().values

    def _loss(self, change: Callable[[Tensor, int, Tensor, Tensor], None]) -> float:
        """Of a token that counts, in the mean. `change` also gets which rows are of a text."""
        loss = 0.0
        with torch.inference_mode():
            for batch in self._batches:
                with self._model.changed_gates(partial(change, batch.is_text_BS.flatten())):
                    loss += float(self._model.loss(batch))
        return loss / self._num_expected
