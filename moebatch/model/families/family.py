"""What a family is composed of, as far as it is computed.

Shape letters: T tokens, N rows after bucketing, M rows, D hidden, E experts, K experts per token,
H query heads, C head size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moebatch.formats.weight_format import Matrix
from moebatch.model.attention.by_torch import Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.products import Weights
from moebatch.model.recurrence.block import RecurrentBlock, ShortConvolutionBlock
from moebatch.model.recurrence.gated_delta import ChannelDeltaBlock, GatedDeltaBlock
from moebatch.model.recurrence.lightning import LightningBlock
from moebatch.model.recurrence.selective_scan import SelectiveScanBlock
from moebatch.model.recurrence.state_space import StateSpaceBlock
from moebatch.model.routing.router import choose_experts
from moebatch.model.scratch import Frame
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.recurrence import (
    ChannelDelta,
    GatedDelta,
    LightningAttention,
    Recurrence,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from moebatch.spec.model.shape import ModelShape


class AttentionBlock(Protocol):
    """What is done with weights before attention itself and after it."""

    def project(self, work: LayerWork) -> Qkv:
        """Rotated queries and keys, and values; rows beyond the micro-batch hold garbage."""

    def output(self, work: LayerWork, out_NHV: Tensor) -> Tensor:
        """What attention adds to the hidden states, [N, D], of what a core has made, which may
        become anything. What has been projected opens gates, where there are such."""

    def attend(self, work: LayerWork) -> Tensor:
        """All of it, where its own core and the cache are on the device of the weights."""


MakeAttention = Callable[[ModelShape, Attention, Operators, AttentionCore], AttentionBlock]
"""Of one of the ways in which layers of the shape attend."""
MakeRecurrence = Callable[[ModelShape, Recurrence, Operators], RecurrentBlock]
"""Of what recurrent layers of the shape do."""
Router = Callable[[Tensor, ModelShape, Weights, torch.dtype], tuple[Tensor, Tensor]]
"""Of the logits [T, E] of a gate, the layer's weights and the dtype of the computation: weights
[T, K], in descending order for each token, and experts [T, K], int64."""
Expert = Callable[[Frame, Tensor, int, Mapping[str, Matrix], Operators], Tensor]
"""Of a frame, inputs [N, D], the number M of rows that count and the matrices by role: [M, D]."""


_RECURRENT_BLOCKS: Mapping[type[Recurrence], Callable[..., RecurrentBlock]] = {
    ChannelDelta: ChannelDeltaBlock,
    GatedDelta: GatedDeltaBlock,
    LightningAttention: LightningBlock,
    SelectiveScan: SelectiveScanBlock,
    ShortConvolution: ShortConvolutionBlock,
    StateSpace: StateSpaceBlock,
}


def described_router(
    logits_TE: Tensor, shape: ModelShape, weights: Weights, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As the shape's `Router` says."""
    return choose_experts(logits_TE, shape.router, shape.experts_per_token, weights, dtype)


def described_recurrence(
    shape: ModelShape, recurrence: Recurrence, operators: Operators
) -> RecurrentBlock:
    """As the kind of recurrence asks for."""
    return _RECURRENT_BLOCKS[type(recurrence)](shape, recurrence, operators)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The blocks of a decoder. Layers are: norm, attention or recurrence, norm, and experts or an
    MLP, with more norms where the shape has such."""

    attention: MakeAttention
    expert: Expert
    """Experts, shared experts, and MLPs of layers without experts."""
    recurrence: MakeRecurrence = described_recurrence
    router: Router = described_router
