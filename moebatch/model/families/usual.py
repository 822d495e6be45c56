"""The composition of most families, Qwen's and OLMoE among them; Mixtral's but for its router.

Shape letters: T tokens, M rows, N rows after bucketing, D hidden, E experts, K experts per token,
F width of an MLP.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.formats.weight_format import Matrix
from moebatch.model.elementwise import Elementwise
from moebatch.model.families.family import Family, Weights
from moebatch.model.grouped_attention import GroupedAttentionBlock
from moebatch.model.products import Products
from moebatch.model.router import choose_experts
from moebatch.model.scratch import Frame
from moebatch.spec.shape import ModelShape


def softmax_router(
    logits_TE: Tensor, shape: ModelShape, weights: Weights, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The top K of a softmax over all experts, which sum to one where the model says so."""
    return choose_experts(
        logits_TE,
        shape.experts_per_token,
        normalise=shape.router.norm_topk_prob,
        weights_dtype=dtype,
    )


def gated_mlp(
    frame: Frame,
    x_ND: Tensor,
    num_rows: int,
    matrices: Mapping[str, Matrix],
    products: Products,
    elementwise: Elementwise,
) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` [M, D] of the first M = `num_rows` rows."""
    width = matrices["gate"].shape[0]
    gate_NF, up_NF = frame.take(len(x_ND), width), frame.take(len(x_ND), width)
    products.linear(x_ND, matrices["gate"], None, gate_NF)
    products.linear(x_ND, matrices["up"], None, up_NF)
    elementwise.gate(gate_NF[:num_rows], up_NF[:num_rows])
    out_ND = frame.take(*x_ND.shape)
    return products.linear(gate_NF, matrices["down"], None, out_ND)[:num_rows]


USUAL = Family(attention=GroupedAttentionBlock, router=softmax_router, expert=gated_mlp)
