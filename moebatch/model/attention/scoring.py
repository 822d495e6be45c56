"""How scores of what queries see become weights.

Shape letters: T tokens of the micro-batch, S positions, H query heads, G KV heads, C head size;
X any dimensions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class SinkQueries(NamedTuple):
    """Of the keys that each token sees, the first so many, the sinks, are met by other queries."""

    num_sinks: int
    q_THC: Tensor
    """Those of the micro-batch, rotated as if they were nearer."""


class Scoring(NamedTuple):
    """By what scores are multiplied, and what else takes part in their softmax."""

    scale: float
    sinks: SinkQueries | None = None
    sink_scores_H: Tensor | None = None
    """In float32: take part in the softmax of each head as one key more would whose value is
    nothing (gpt-oss; with a score of zero Miller's "softmax one", 2023)."""

    @property
    def is_fused(self) -> bool:
        """Whether torch has one product for it: none meets keys with two queries, or knows scores
        without a key."""
        return self.sinks is None and self.sink_scores_H is None

    def of(self, tokens: Tensor | slice) -> "Scoring":
        """That of some tokens."""
        if self.sinks is None:
            return self
        return self._replace(sinks=self.sinks._replace(q_THC=self.sinks.q_THC[tokens]))

    def weights(
        self,
        q_THC: Tensor,
        k_XSC: Tensor,
        mask_XTS: Tensor,
        arranged: Callable[[Tensor], Tensor],
        heads: tuple[int, ...],
    ) -> Tensor:
        """Softmax of the scores of every query and key, [X, T, S] in float32. `arranged` gives
        queries the order of the keys, in which those of a head have the shape `heads`."""
        scores_XTS = (arranged(q_THC) @ k_XSC.mT).float()
        if self.sinks is not None:
            num_sinks, turned_THC = self.sinks
            keys_XSC = k_XSC[..., :num_sinks, :]
            scores_XTS[..., :num_sinks] = arranged(turned_THC) @ keys_XSC.mT
        scores_XTS.mul_(self.scale).add_(mask_XTS)
        if self.sink_scores_H is None:
            return scores_XTS.softmax(-1)
        beside_XT1 = self.sink_scores_H.view(heads)
        largest_XT1 = torch.maximum(scores_XTS.amax(-1, keepdim=True), beside_XT1)
        scores_XTS.sub_(largest_XT1).exp_()
        total_XT1 = scores_XTS.sum(-1, keepdim=True).add_((beside_XT1 - largest_XT1).exp_())
        return scores_XTS.div_(total_XT1)
