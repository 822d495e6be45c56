"""Layers that convolve and no more (LFM2).

Shape letters: T tokens of the micro-batch, N rows after bucketing, D hidden, P projected width.
"""

import torch
from torch import Tensor

from moebatch.model.recurrence.block import RecurrentBlock, State, Weights
from moebatch.model.recurrence.plan import RecurrentPlan
from moebatch.model.scratch import Frame


class ShortConvolutionBlock(RecurrentBlock):
    """A gated convolution: what goes in is multiplied, and what comes out."""

    activates = False

    def _mix(
        self,
        frame: Frame,
        projected_NP: Tensor,
        plan: RecurrentPlan,
        weights: Weights,
        state: State,
        out_TX: Tensor,
    ) -> None:
        before_TD, behind_TD, x_TD = projected_NP[: plan.num_tokens].chunk(3, dim=1)
        x_TD *= before_TD
        mixed_TD = self._convolved(frame, x_TD, plan, weights, state)
        torch.mul(mixed_TD, behind_TD, out=out_TX)
