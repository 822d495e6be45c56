"""Layers of Mamba-2: what their rule is given, and what becomes of what its matrices put out.

Shape letters: T tokens of the micro-batch, N rows after bucketing, P projected width, M channels of
the convolution, G key heads, H value heads, K size of a key, V size of a value, X several of these
side by side.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model import layers
from moebatch.model.layer_work import LayerWork
from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.recurrence.block import MatrixBlock


class StateSpaceBlock(MatrixBlock):
    """A state space whose matrices fade by the length of a token's time step (Dao & Gu 2024)."""

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        space, weights = self._matrix, work.weights
        widths = [space.value_width, space.conv_channels, space.num_value_heads]
        z_TX, x_TM, steps_TH = torch.split(projected_NP[: work.num_tokens], widths, dim=1)
        given = self._given(work, self._convolution.run(work, x_TM), steps_TH)
        made_THV = self._put_out(work, given)
        made_THV.addcmul_(given.v_THV, weights["recurrent_skip"][:, None].float())
        made_TX = made_THV.view(out_TX.shape)
        made_TX.mul_(F.silu(z_TX.float()))
        made_TGX, out_TGX = (x.view(len(x), space.num_key_heads, -1) for x in (made_TX, out_TX))
        weight_GX = weights["recurrent_norm"].view(space.num_key_heads, -1)
        layers.rms_norm(made_TGX, weight_GX, self._eps, made_TGX, out_TGX)

    def _given(self, work: LayerWork, mixed_TM: Tensor, steps_TH: Tensor) -> DeltaInput:
        space, weights = self._matrix, work.weights
        widths = [space.value_width, space.key_width, space.key_width]
        v_TX, k_TX, q_TX = (
            work.frame.take_float(*x.shape).copy_(x) for x in torch.split(mixed_TM, widths, dim=1)
        )
        lengths_TH = F.softplus(steps_TH.float() + weights["recurrent_step"])
        return DeltaInput(
            q_TGK=q_TX.view(len(q_TX), -1, space.key_head_dim),
            k_TGK=k_TX.view(len(k_TX), -1, space.key_head_dim),
            v_THV=v_TX.view(len(v_TX), -1, space.value_head_dim),
            rates_TH=lengths_TH,
            fading_THF=(lengths_TH * -weights["recurrent_decay"].float().exp())[..., None],
        )
