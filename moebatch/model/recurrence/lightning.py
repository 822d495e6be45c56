"""Layers of lightning attention: what their rule is given, and what becomes of what its matrices
put out.

Shape letters: T tokens of the micro-batch, N rows after bucketing, P projected width, H heads,
K size of a key, V size of a value, L layers, X several of these side by side.
"""

import torch
from torch import Tensor

from moebatch.model.layer_work import LayerWork
from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.operators import Operators
from moebatch.model.recurrence.block import MatrixBlock
from moebatch.spec.model.recurrence import LightningAttention
from moebatch.spec.model.shape import ModelShape

_NORM_EPS = 1e-6
"""Of what comes out, whatever other norms add."""


class LightningBlock(MatrixBlock):
    """Matrices that fade alike with every token (Qin et al. 2024)."""

    def __init__(
        self, shape: ModelShape, recurrence: LightningAttention, operators: Operators
    ) -> None:
        super().__init__(shape, recurrence, operators)
        fading = [recurrence.fading(layer) for layer in range(recurrence.num_layers)]
        self._fading_LH = torch.tensor(fading, dtype=torch.float32, device=operators.device)

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        widths = [self._matrix.conv_channels, self._matrix.value_width]
        x_TX, z_TX = torch.split(projected_NP[: work.num_tokens], widths, dim=1)
        self._elementwise.activate(x_TX)
        made_THV = self._put_out(work, self._given(work, x_TX))
        made_TX, norm_X = made_THV.view(out_TX.shape), work.weights["recurrent_norm"]
        self._elementwise.rms_norm(made_TX, norm_X, _NORM_EPS, made_TX, out_TX)
        out_TX.mul_(z_TX.sigmoid_())

    def _given(self, work: LayerWork, x_TX: Tensor) -> DeltaInput:
        """Values as they are, and of each head the same fading for all tokens."""
        frame, matrix = work.frame, self._matrix
        num_tokens, num_heads = len(x_TX), matrix.num_value_heads
        widths = [matrix.key_width, matrix.key_width, matrix.value_width]
        q_TX, k_TX, v_TX = (
            frame.take_float(*x.shape).copy_(x) for x in torch.split(x_TX, widths, dim=1)
        )
        fading_TH = frame.take_float(num_tokens, num_heads).copy_(self._fading_LH[work.layer])
        return DeltaInput(
            q_TGK=q_TX.view(num_tokens, -1, matrix.key_head_dim),
            k_TGK=k_TX.view(num_tokens, -1, matrix.key_head_dim),
            v_THV=v_TX.view(num_tokens, -1, matrix.value_head_dim),
            rates_TH=v_TX.new_ones(num_tokens, num_heads),
            fading_THF=fading_TH[..., None],
        )
