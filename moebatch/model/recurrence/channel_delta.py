"""Layers of Kimi Delta Attention: the delta rule with channels of keys that fade apart.

Shape letters: T tokens of the micro-batch, N rows after bucketing, P projected width, M channels of
the convolution, H value heads, K size of a key, V size of a value, R numbers through which gates
and fading are projected, X several of these side by side.
"""

import torch
from torch import Tensor

from moebatch.model.recurrence.block import LayerWork
from moebatch.model.recurrence.gated_delta import GatedDeltaBlock
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import ChannelDelta


class ChannelDeltaBlock(GatedDeltaBlock):
    """As Gated DeltaNet, but for where fading and gates come from (Kimi Team 2025)."""

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        tokens, weights = slice(work.plan.num_tokens), work.weights
        delta = self._recurrence
        assert isinstance(delta, ChannelDelta), "its block is made for it"
        widths = [delta.conv_channels, delta.rank, delta.num_value_heads, delta.rank]
        x_NM, z_NR, b_NH, a_NR = torch.split(projected_NP, widths, dim=1)
        z_NX, a_NX = (
            self._widened(work.frame, x_NR, weights[role])
            for x_NR, role in ((z_NR, "delta_z_wide"), (a_NR, "delta_a_wide"))
        )
        mixed_TM = self._convolved(work, x_NM[tokens])
        given = self._given(work, mixed_TM, b_NH[tokens], a_NX[tokens])
        made_THV = self._put_out(work, given)
        norm_V = weights["recurrent_norm"]
        self._elementwise.rms_norm(made_THV, norm_V, self._eps, made_THV, made_THV)
        gates_THV = given.v_THV.copy_(z_NX[tokens].view(made_THV.shape)).sigmoid_()
        torch.mul(made_THV, gates_THV, out=out_TX.view(made_THV.shape))

    def _widened(self, frame: Frame, x_NR: Tensor, weight_XR: Tensor) -> Tensor:
        room_NX = frame.take(len(x_NR), len(weight_XR))
        return self._products.linear(x_NR, weight_XR, None, room_NX)
