"""Layers of Gated DeltaNet, and of Kimi Delta Attention, whose channels of keys fade apart: what
their rule is given, and what becomes of what its matrices put out.

Shape letters: T tokens of the micro-batch, N rows after bucketing, P projected width, M channels of
the convolution, G key heads, H value heads, K size of a key, V size of a value, X several of these
side by side, F one or K: numbers by which a matrix fades, R those through which gates and fading
are projected.
"""

import torch
from torch import Tensor

from moebatch.model.layer_work import LayerWork
from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.operators import Operators
from moebatch.model.recurrence.block import MatrixBlock
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import ChannelDelta, MatrixRecurrence
from moebatch.spec.model.shape import ModelShape

_NORM_EPS = 1e-6
"""Of queries and keys, whatever other norms add."""


class GatedDeltaBlock(MatrixBlock):
    """Matrices whose keys and queries are unit vectors (Yang et al. 2024)."""

    def __init__(
        self, shape: ModelShape, recurrence: MatrixRecurrence, operators: Operators
    ) -> None:
        super().__init__(shape, recurrence, operators)
        self._zero = torch.zeros((), device=operators.device)

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        delta, heads = self._matrix, self._matrix.num_value_heads
        widths = [delta.conv_channels, delta.value_width, heads, heads]
        x_TM, z_TX, b_TH, a_TH = torch.split(projected_NP[: work.num_tokens], widths, dim=1)
        given = self._given(work, self._convolution.run(work, x_TM), b_TH, a_TH)
        made_THV = self._put_out(work, given)
        z_THV, out_THV = (x.view(made_THV.shape) for x in (z_TX, out_TX))
        norm_V = work.weights["recurrent_norm"]
        self._elementwise.norm_gated(made_THV, norm_V, self._eps, z_THV, out_THV)

    def _given(self, work: LayerWork, mixed_TM: Tensor, b_TH: Tensor, a_TX: Tensor) -> DeltaInput:
        """Queries and keys as unit vectors, the former over the root of their size."""
        delta, frame, weights = self._matrix, work.frame, work.weights
        q_TX, k_TX, v_TX = torch.split(
            mixed_TM, [delta.key_width, delta.key_width, delta.value_width], 1
        )
        q_TGK, k_TGK = (_unit(x.view(len(x), -1, delta.key_head_dim), frame) for x in (q_TX, k_TX))
        v_TX = frame.take_float(*v_TX.shape).copy_(v_TX)
        rise_TX = frame.take_float(*a_TX.shape).copy_(a_TX).add_(weights["recurrent_step"])
        decays_H1 = weights["recurrent_decay"].view(-1, 1).float().exp()
        return DeltaInput(
            q_TGK=q_TGK.mul_(delta.key_head_dim**-0.5),
            k_TGK=k_TGK,
            v_THV=v_TX.view(len(v_TX), -1, delta.value_head_dim),
            rates_TH=b_TH.sigmoid().float().contiguous(),
            fading_THF=self._fading(rise_TX.view(len(v_TX), delta.num_value_heads, -1), decays_H1),
        )

    def _fading(self, rise_THF: Tensor, decays_H1: Tensor) -> Tensor:
        """Softplus, times a number of the head; in place."""
        torch.logaddexp(rise_THF, self._zero, out=rise_THF)
        return rise_THF.mul_(-decays_H1)


class ChannelDeltaBlock(GatedDeltaBlock):
    """As Gated DeltaNet, but for where fading and gates come from (Kimi Team 2025)."""

    @property
    def _delta(self) -> ChannelDelta:
        assert isinstance(self._recurrence, ChannelDelta), "its block is made for it"
        return self._recurrence

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        tokens, weights = slice(work.num_tokens), work.weights
        delta = self._delta
        of_gates, of_fading = delta.made_of_widths
        widths = [delta.conv_channels, of_gates, delta.num_value_heads, of_fading]
        x_NM, z_NX, b_NH, a_NX = torch.split(projected_NP, widths, dim=1)
        if delta.rank is not None:
            z_NX, a_NX = (
                self._products.of_role(work.frame, x_NR, weights, role)
                for x_NR, role in ((z_NX, "delta_z_wide"), (a_NX, "delta_a_wide"))
            )
        mixed_TM = self._convolution.run(work, x_NM[tokens])
        given = self._given(work, mixed_TM, b_NH[tokens], a_NX[tokens])
        made_THV = self._put_out(work, given)
        norm_V = weights["recurrent_norm"]
        self._elementwise.rms_norm(made_THV, norm_V, self._eps, made_THV, made_THV)
        gates_THV = given.v_THV.copy_(z_NX[tokens].view(made_THV.shape)).sigmoid_()
        torch.mul(made_THV, gates_THV, out=out_TX.view(made_THV.shape))

    def _fading(self, rise_THF: Tensor, decays_H1: Tensor) -> Tensor:
        least = self._delta.least_fading
        if least is None:
            return super()._fading(rise_THF, decays_H1)
        return rise_THF.mul_(decays_H1).sigmoid_().mul_(least)


def _unit(x_TGK: Tensor, frame: Frame) -> Tensor:
    unit_TGK = frame.take_float(*x_TGK.shape)
    squares_TG1 = torch.linalg.vector_norm(x_TGK, dim=-1, keepdim=True).square_()
    return torch.mul(x_TGK, squares_TG1.add_(_NORM_EPS).rsqrt_(), out=unit_TGK)
