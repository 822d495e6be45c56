"""Mixtral (Mistral AI)."""

from dataclasses import replace

import torch
from torch import Tensor

from moebatch.model.families.family import Weights
from moebatch.model.families.usual import USUAL, softmax_router
from moebatch.spec.shape import ModelShape


def _router(
    logits_TE: Tensor, shape: ModelShape, weights: Weights, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Mixtral alone keeps the weights in float32, whatever the rest is computed in."""
    return softmax_router(logits_TE, shape, weights, torch.float32)


MIXTRAL = replace(USUAL, router=_router)
