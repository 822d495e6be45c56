"""The gated MLP: an expert, a shared expert, or the MLP of a layer without experts.

Shape letters: M rows, N rows after bucketing, D hidden, F MLP width.
"""

import torch
from torch import Tensor

from moebatch.model.elementwise import Elementwise
from moebatch.model.families import ExpertWeights
from moebatch.model.layers import linear
from moebatch.model.scratch import Frame


def gated_mlp(
    frame: Frame, x_ND: Tensor, num_rows: int, weights: ExpertWeights, elementwise: Elementwise
) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` [M, D] of the first M = `num_rows` rows.

    Weights of another dtype are converted.
    """
    convert = _Converter(frame, x_ND.dtype)
    width = weights.gate_FD.shape[0]
    gate_NF, up_NF = frame.take(len(x_ND), width), frame.take(len(x_ND), width)
    linear(x_ND, convert(weights.gate_FD), None, gate_NF)
    linear(x_ND, convert(weights.up_FD), None, up_NF)
    elementwise.gate(gate_NF[:num_rows], up_NF[:num_rows])
    out_ND = frame.take(*x_ND.shape)
    return linear(gate_NF, convert(weights.down_DF), None, out_ND)[:num_rows]


class _Converter:
    """Brings one matrix at a time to the compute dtype, in one buffer of the frame."""

    def __init__(self, frame: Frame, dtype: torch.dtype) -> None:
        self._frame = frame
        self._dtype = dtype
        self._buffer: Tensor | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        if weight.dtype == self._dtype:
            return weight
        if self._buffer is None:
            self._buffer = self._frame.take(weight.numel())
        return self._buffer.view(weight.shape).copy_(weight)
