"""What is known of a model's routing: how many experts some tokens choose, which of them a cache
would have held, and how often predictors are right.

Shape letters: L MoE layers, B batches, E experts of a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moebatch.arrays import Floats
from moebatch.spec.policy.policy import CacheRule, Policy, PredictorName


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Of one model on one text. Passes are of so many sequences with one token each."""

    batches: tuple[int, ...]
    """Tokens of the passes that were looked at, rising."""
    chosen_BL: Floats
    """Experts of a layer that are chosen by at least one token."""
    missing: Mapping[CacheRule, Floats]
    """Of these, those that are not there, by how many of the layer's experts stay,
    [B, L, E + 1]. With the rule foreseen: if no predictor foresees anything."""
    missing_known: Floats
    """The same with the rule foreseen, if all that the next pass chooses is known."""
    accuracy: Mapping[PredictorName, tuple[float, ...]]
    """Of the K experts that a predictor names for a token, the share that is chosen, by layer;
    `none` names those that are chosen most often."""

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.chosen_BL.shape[1])

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        return int(next(iter(self.missing.values())).shape[2]) - 1

    def covers(self, tokens: float) -> bool:
        """Whether passes of so many tokens are known."""
        return 0 < tokens <= self.batches[-1]

    def chosen(self, tokens: float) -> Floats:
        """Experts of each layer that a pass needs, [L]."""
        return self._between(self.chosen_BL, tokens)

    def absent(
        self, rule: CacheRule, predictor: PredictorName, tokens: float, sizes: Sequence[int]
    ) -> Floats:
        """Of these, those that are not among the so many that stay in each layer, [L]. What a
        predictor is right about is known to a cache that goes by it."""
        layers = np.arange(self.num_layers)
        missing_LS = self._between(self.missing[rule], tokens)
        if rule == "foreseen" and predictor != "none":
            known_LS = self._between(self.missing_known, tokens)
            missing_LS += np.asarray(self.accuracy[predictor])[:, None] * (known_LS - missing_LS)
        absent_L: Floats = missing_LS[layers, np.asarray(sizes)]
        return absent_L

    def right(self, predictor: PredictorName, tokens: float) -> Floats:
        """Share of the experts named for a pass that some token of it chooses, [L]: the one that
        they are named for, or another one by chance."""
        by_token_L = np.asarray(self.accuracy[predictor])
        others_L = self.chosen(max(1.0, tokens - 1)) / self.num_experts if tokens > 1 else 0.0
        return by_token_L + (1 - by_token_L) * others_L

    def predictor_of(self, policy: Policy) -> PredictorName:
        """The one of a policy; one that is not known counts as none."""
        name = policy.predictor or "correlation"
        return name if name in self.accuracy else "none"

    def _between(self, figures: Floats, tokens: float) -> Floats:
        """Figures of the batches on both sides, mixed as their logarithms lie; [B, ...]."""
        place = np.interp(np.log(tokens), np.log(self.batches), np.arange(len(self.batches)))
        below = min(int(place), len(self.batches) - 1)
        above, share = min(below + 1, len(self.batches) - 1), place - below
        mixed: Floats = (1 - share) * figures[below] + share * figures[above]
        return mixed
