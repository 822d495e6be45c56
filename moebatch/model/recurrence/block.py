"""A layer that recurs, between the norm of its input and what it adds to the hidden states.

Shape letters: T tokens of the micro-batch, N rows after bucketing, D hidden, P projected width,
M channels of the convolution, X width of what is projected back, H value heads, V size of a value.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.model.elementwise import Elementwise
from moebatch.model.native.delta_rule import DeltaInput
from moebatch.model.products import Products
from moebatch.model.recurrence.convolution import Convolution
from moebatch.model.recurrence.delta_rule import DeltaRule
from moebatch.model.recurrence.plan import RecurrentPlan
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import MatrixRecurrence, Recurrence
from moebatch.spec.model.shape import ModelShape

Weights = Mapping[str, Tensor]
State = Sequence[Tensor]
"""Parts as `Recurrence.state` names them, of all sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """A layer over a micro-batch: scratch, sequences, and what the layer has of its own."""

    frame: Frame
    plan: RecurrentPlan
    weights: Weights
    state: State


class RecurrentBlock(ABC):
    """What kinds of recurrence share: both projections, and the convolution."""

    activates = True
    """silu follows the convolution."""

    def __init__(
        self,
        shape: ModelShape,
        recurrence: Recurrence,
        products: Products,
        elementwise: Elementwise,
        device: torch.device,
    ) -> None:
        self._recurrence = recurrence
        self._hidden_size, self._eps = shape.hidden_size, shape.rms_eps
        self._products, self._elementwise = products, elementwise
        self._convolution = Convolution(device, activates=self.activates)

    def run(
        self,
        frame: Frame,
        normed_ND: Tensor,
        plan: RecurrentPlan,
        weights: Weights,
        state: State,
    ) -> Tensor:
        """What it adds to the hidden states, [N, D]; rows beyond the micro-batch hold garbage.

        Changes the state of all sequences of the plan.
        """
        recurrence, num_rows = self._recurrence, len(normed_ND)
        for part in state:
            part.index_fill_(0, plan.begun_B, 0)
        room_NP = frame.take(num_rows, recurrence.projected_width)
        bias_P = weights.get("recurrent_in_bias")
        self._products.linear(normed_ND, weights["recurrent_in"], bias_P, room_NP)
        out_NX = frame.take(num_rows, recurrence.output_width)
        work = LayerWork(frame=frame, plan=plan, weights=weights, state=state)
        self._mix(work, room_NP, out_NX[: plan.num_tokens])
        out_ND = frame.take(num_rows, self._hidden_size)
        bias_D = weights.get("recurrent_out_bias")
        return self._products.linear(out_NX, weights["recurrent_out"], bias_D, out_ND)

    @abstractmethod
    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        """Writes what is projected back, of which tokens of a sequence have part in each other.
        `projected_NP` may become anything."""

    def _convolved(self, work: LayerWork, x_TM: Tensor) -> Tensor:
        """[T, M] float32, rounded as `x_TM` is."""
        mixed_TM = work.frame.take_float(*x_TM.shape)
        taps_M1W, bias_M = work.weights["recurrent_conv"], work.weights.get("recurrent_conv_bias")
        seen_RLM = work.state[-1]
        self._convolution.run(work.frame, work.plan, x_TM, taps_M1W, bias_M, seen_RLM, mixed_TM)
        return mixed_TM


class MatrixBlock(RecurrentBlock):
    """What kinds share whose states hold matrices."""

    def __init__(
        self,
        shape: ModelShape,
        recurrence: MatrixRecurrence,
        products: Products,
        elementwise: Elementwise,
        device: torch.device,
    ) -> None:
        super().__init__(shape, recurrence, products, elementwise, device)
        self._matrix, self._rule = recurrence, DeltaRule(recurrence, device)

    def _put_out(self, work: LayerWork, given: DeltaInput) -> Tensor:
        """[T, H, V] float32, which matrices put out as they change."""
        sizes = self._matrix.num_value_heads, self._matrix.key_head_dim, self._matrix.value_head_dim
        made_THV = work.frame.take_float(*given.v_THV.shape)
        self._rule.run(work.frame, work.plan, given, work.state[0].view(-1, *sizes), made_THV)
        return made_THV
