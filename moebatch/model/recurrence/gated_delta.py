"""A layer that recurs: its projections, its convolution, and what becomes of what its matrices
put out.

Shape letters: T tokens of the micro-batch, N rows after bucketing, D hidden, P projected width,
M channels of the convolution, L tokens that it sees before a new one, G key heads, H value heads,
K size of a key, V size of a value, X several of these side by side, R rows of the state.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model.elementwise import Elementwise
from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.products import Products
from moebatch.model.recurrence.convolution import Convolution
from moebatch.model.recurrence.delta_plan import DeltaPlan
from moebatch.model.recurrence.delta_rule import DeltaRule
from moebatch.model.scratch import Frame
from moebatch.spec.model.shape import ModelShape

_NORM_EPS = 1e-6
"""Of queries and keys, whatever other norms add."""


class GatedDeltaBlock:
    """Gated DeltaNet between the norm of its input and what it adds to the hidden states."""

    def __init__(
        self, shape: ModelShape, products: Products, elementwise: Elementwise, device: torch.device
    ) -> None:
        assert shape.recurrence is not None, "the family's own recurrence"
        self._delta = shape.recurrence
        self._hidden_size, self._eps = shape.hidden_size, shape.rms_eps
        self._products, self._elementwise = products, elementwise
        self._convolution, self._rule = Convolution(device), DeltaRule(self._delta, device)

    def run(
        self,
        frame: Frame,
        normed_ND: Tensor,
        plan: DeltaPlan,
        weights: Mapping[str, Tensor],
        state: Sequence[Tensor],
    ) -> Tensor:
        """What it adds to the hidden states, [N, D]; rows beyond the micro-batch hold garbage.

        Changes `state`, parts as `GatedDelta.state` names them, for all sequences of the plan.
        """
        delta, num_rows = self._delta, len(normed_ND)
        matrices_RHX, inputs_RLM = state
        for part in state:
            part.index_fill_(0, plan.begun_B, 0)
        room_NP = frame.take(num_rows, delta.projected_width)
        projected_NP = self._products.linear(normed_ND, weights["delta_in"], None, room_NP)
        heads = delta.num_value_heads
        widths = [delta.conv_channels, delta.value_width, heads, heads]
        x_TM, z_TX, b_TH, a_TH = torch.split(projected_NP[: plan.num_tokens], widths, dim=1)
        mixed_TM = frame.take_float(*x_TM.shape)
        self._convolution.run(frame, plan, x_TM, weights["delta_conv"], inputs_RLM, mixed_TM)
        matrices = matrices_RHX.view(-1, heads, delta.key_head_dim, delta.value_head_dim)
        out_THV = frame.take_float(plan.num_tokens, heads, delta.value_head_dim)
        given = self._given(frame, mixed_TM, b_TH, a_TH, weights)
        self._rule.run(frame, plan, given, matrices, out_THV)
        gated_NX = frame.take(num_rows, delta.value_width)
        gated_THV = gated_NX[: plan.num_tokens].view(out_THV.shape)
        self._elementwise.norm_gated(
            out_THV, weights["delta_norm"], self._eps, z_TX.view(out_THV.shape), gated_THV
        )
        out_ND = frame.take(num_rows, self._hidden_size)
        return self._products.linear(gated_NX, weights["delta_o"], None, out_ND)

    def _given(
        self,
        frame: Frame,
        mixed_TM: Tensor,
        b_TH: Tensor,
        a_TH: Tensor,
        weights: Mapping[str, Tensor],
    ) -> DeltaInput:
        """Queries and keys as unit vectors, the former over the root of their size."""
        delta = self._delta
        q_TX, k_TX, v_TX = torch.split(
            mixed_TM, [delta.key_width, delta.key_width, delta.value_width], 1
        )
        q_TGK, k_TGK = (_unit(x.view(len(x), -1, delta.key_head_dim), frame) for x in (q_TX, k_TX))
        v_TX = frame.take_float(*v_TX.shape).copy_(v_TX)
        rise_TH = F.softplus(a_TH.float() + weights["delta_step"])
        return DeltaInput(
            q_TGK=q_TGK.mul_(delta.key_head_dim**-0.5),
            k_TGK=k_TGK,
            v_THV=v_TX.view(len(v_TX), -1, delta.value_head_dim),
            rates_TH=b_TH.sigmoid().float().contiguous(),
            fading_TH=rise_TH.mul_(-weights["delta_decay"].float().exp()),
        )


def _unit(x_TGK: Tensor, frame: Frame) -> Tensor:
    unit_TGK = frame.take_float(*x_TGK.shape)
    squares_TG1 = torch.linalg.vector_norm(x_TGK, dim=-1, keepdim=True).square_()
    return torch.mul(x_TGK, squares_TG1.add_(_NORM_EPS).rsqrt_(), out=unit_TGK)
