"""Layers that convolve and no more (LFM2).

Shape letters: T tokens of the micro-batch, N rows after bucketing, D hidden, P projected width.
"""

import torch
from torch import Tensor

from moebatch.model.layer_work import LayerWork
from moebatch.model.recurrence.block import RecurrentBlock


class ShortConvolutionBlock(RecurrentBlock):
    """A gated convolution: what goes in is multiplied, and what comes out."""

    activates = False

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        before_TD, behind_TD, x_TD = projected_NP[: work.num_tokens].chunk(3, dim=1)
        x_TD *= before_TD
        torch.mul(self._convolution.run(work, x_TD), behind_TD, out=out_TX)
