"""Which experts each token chooses.

Shape letters: T tokens, D hidden, E experts, K experts per token, M tokens of one expert.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertTokens(NamedTuple):
    """The tokens that chose an expert, ascending."""

    rows_M: Tensor
    """Row of each token, int64."""
    choices_M: Tensor
    """Which of its K choices the expert is, int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """A MoE layer's input, what its tokens chose, and what their experts made of it."""

    normed_TD: Tensor
    weights_TK: Tensor
    tokens: dict[int, ExpertTokens]
    """Per chosen expert the tokens that chose it, ascending by expert."""
    outputs_TKD: Tensor
    """Weighted outputs of the experts, each in its own place: they are summed in a fixed order, so
    that results do not depend on the order in which experts arrive."""

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts that at least one token chose, ascending."""
        return tuple(self.tokens)


def choose_experts(
    logits_TE: Tensor, num_chosen: int, *, normalise: bool, weights_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] and experts [T, K] of each token: top K of a float32 softmax.

    `normalise` makes the weights of a token sum to one before they are rounded.
    """
    probs_TE = F.softmax(logits_TE, dim=-1, dtype=torch.float32)
    weights_TK, experts_TK = torch.topk(probs_TE, num_chosen, dim=-1)
    if normalise:
        weights_TK /= weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(weights_dtype), experts_TK


def group_by_expert(experts_TK: Tensor, num_experts: int) -> dict[int, ExpertTokens]:
    """Tokens of every expert that was chosen, by one sort."""
    chosen = experts_TK.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=num_experts).tolist()
    num_choices = experts_TK.shape[1]
    rows = torch.split(order // num_choices, counts)
    choices = torch.split(order % num_choices, counts)
    return {
        expert: ExpertTokens(rows[expert], choices[expert])
        for expert, count in enumerate(counts)
        if count
    }
