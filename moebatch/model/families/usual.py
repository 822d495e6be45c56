"""The composition of most families.

Shape letters: M rows, N rows after bucketing, D hidden, F width of an MLP.
"""

from collections.abc import Mapping

from torch import Tensor

from moebatch.formats.weight_format import Matrix
from moebatch.model.elementwise import Elementwise
from moebatch.model.families.family import Family
from moebatch.model.grouped_attention import GroupedAttentionBlock
from moebatch.model.products import Products
from moebatch.model.scratch import Frame


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


USUAL = Family(attention=GroupedAttentionBlock, expert=gated_mlp)
