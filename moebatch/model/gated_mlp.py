"""The gated MLP: an expert, a shared expert, or the MLP of a layer without experts.

Shape letters: M rows, N rows after bucketing, D hidden, F MLP width.
"""

from torch import Tensor

from moebatch.model.elementwise import Elementwise
from moebatch.model.families import ExpertWeights
from moebatch.model.products import Products
from moebatch.model.scratch import Frame


def gated_mlp(
    frame: Frame,
    x_ND: Tensor,
    num_rows: int,
    weights: ExpertWeights,
    products: Products,
    elementwise: Elementwise,
) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` [M, D] of the first M = `num_rows` rows."""
    width = weights.gate_FD.shape[0]
    gate_NF, up_NF = frame.take(len(x_ND), width), frame.take(len(x_ND), width)
    products.linear(x_ND, weights.gate_FD, None, gate_NF)
    products.linear(x_ND, weights.up_FD, None, up_NF)
    elementwise.gate(gate_NF[:num_rows], up_NF[:num_rows])
    out_ND = frame.take(*x_ND.shape)
    return products.linear(gate_NF, weights.down_DF, None, out_ND)[:num_rows]
