"""The small building blocks: norm, matrix product, gated MLP.

Shape letters: N rows after bucketing, I inputs, O outputs, D hidden, F MLP width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.errors import CheckpointError
from moebatch.model.families import ExpertWeights
from moebatch.model.scratch import Frame

Activation = Callable[[Tensor], Tensor]


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_NO: Tensor) -> Tensor:
    """``x @ weight.T + bias`` into `out_NO`; the one place where matrices are multiplied."""
    if bias_O is None:
        return torch.mm(x_NI, weight_OI.t(), out=out_NO)
    return torch.addmm(bias_O, x_NI, weight_OI.t(), out=out_NO)


def rms_norm(x: Tensor, weight: Tensor, eps: float, room: Tensor, out: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension into `out`, which may be x.

    `room` is float32 of at least x's size. As in transformers, the norm is computed in float32 and
    rounded before it is multiplied by the weight.
    """
    x32 = room.view(-1)[: x.numel()].view(x.shape).copy_(x)
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    x32.mul_(norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_())
    return out.copy_(x32).mul_(weight)


def gated_mlp(frame: Frame, x_ND: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """``down(activation(gate(x)) * up(x))`` [N, D]; weights of another dtype are converted."""
    convert = _Converter(frame, x_ND.dtype)
    num_rows, width = x_ND.shape[0], weights.gate_FD.shape[0]
    gate_NF, up_NF = frame.take(num_rows, width), frame.take(num_rows, width)
    linear(x_ND, convert(weights.gate_FD), None, gate_NF)
    linear(x_ND, convert(weights.up_FD), None, up_NF)
    hidden_NF = activation(gate_NF).mul_(up_NF)
    return linear(hidden_NF, convert(weights.down_DF), None, frame.take(*x_ND.shape))


def activation_of(name: str) -> Activation:
    """The activation of that name; it may overwrite its argument. Raises CheckpointError."""
    if name in ("silu", "swish"):
        return _silu_in_place
    from transformers.activations import ACT2FN

    try:
        function: Activation = ACT2FN[name]
    except (KeyError, ImportError) as error:
        raise CheckpointError(f"config.json: hidden_act {name!r} is not known") from error
    return function


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


def _silu_in_place(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)
