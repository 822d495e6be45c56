"""The composition of most families.

Shape letters: M rows, N rows after bucketing, D hidden, F width of an MLP.
"""

from collections.abc import Mapping

from torch import Tensor

from moebatch.formats.weight_format import Matrix
from moebatch.model.attention.compressed import CompressedAttentionBlock
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.grouped import GroupedAttentionBlock
from moebatch.model.attention.latent import LatentAttentionBlock
from moebatch.model.families.family import AttentionBlock, Family, MakeAttention
from moebatch.model.operators import Operators
from moebatch.model.scratch import Frame
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.compressed_attention import CompressedAttention
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.shape import ModelShape


def mlp(
    frame: Frame, x_ND: Tensor, num_rows: int, matrices: Mapping[str, Matrix], operators: Operators
) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` [M, D] of the first M = `num_rows` rows, or
    ``down(activation(up(x)))`` where there is no gate; with biases where the matrices have such."""

    def product(x: Tensor, role: str) -> Tensor:
        out = frame.take(x.shape[0], matrices[role].shape[0])
        bias_O = computed_bias(frame, bias_of(matrices, role))
        return operators.products.linear(x, matrices[role], bias_O, out)

    if "gate" in matrices:
        inner_NF, up_NF = product(x_ND, "gate"), product(x_ND, "up")
        operators.elementwise.gate(inner_NF[:num_rows], up_NF[:num_rows])
    else:
        inner_NF = product(x_ND, "up")
        operators.elementwise.activate(inner_NF[:num_rows])
    return product(inner_NF, "down")[:num_rows]


def bias_of(matrices: Mapping[str, Matrix], role: str) -> Tensor | None:
    bias_O = matrices.get(f"{role}_bias")
    assert bias_O is None or isinstance(bias_O, Tensor), "biases are not quantised"
    return bias_O


def computed_bias(frame: Frame, bias_O: Tensor | None) -> Tensor | None:
    """The same bias in the type of the computation, without gaps: files have others."""
    return None if bias_O is None else frame.take(len(bias_O)).copy_(bias_O)


def attention_block(
    shape: ModelShape, attention: Attention, operators: Operators, core: AttentionCore
) -> AttentionBlock:
    """As the kind of attention asks for."""
    make: MakeAttention = GroupedAttentionBlock
    if isinstance(attention, LatentAttention):
        make = LatentAttentionBlock
    elif isinstance(attention, CompressedAttention):
        make = CompressedAttentionBlock
    return make(shape, attention, operators, core)


USUAL = Family(attention=attention_block, expert=mlp)
