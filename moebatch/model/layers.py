"""The small building blocks: norm, matrix product, activation.

Shape letters: N rows after bucketing, I inputs, O outputs, T tokens, H heads, V size of one.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.errors import CheckpointError
from moebatch.quoting import shown

Activation = Callable[[Tensor], Tensor]


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_NO: Tensor) -> Tensor:
    """``x @ weight.T + bias`` into `out_NO`, by torch."""
    if bias_O is None:
        return torch.mm(x_NI, weight_OI.t(), out=out_NO)
    return torch.addmm(bias_O, x_NI, weight_OI.t(), out=out_NO)


def by_root_mean_square(x32: Tensor, eps: float) -> Tensor:
    """Divides numbers in float32 by their root mean square over the last dimension, in place."""
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    return x32.mul_(norm.square_().div_(x32.shape[-1]).add_(eps).rsqrt_())


def rms_norm(x: Tensor, weight: Tensor, eps: float, room: Tensor, out: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension into `out`, which may be x.

    `room` is float32 of at least x's size. The norm is computed in float32 and, as most families of
    transformers have it, rounded before it is multiplied by the weight, unless that is in float32.
    """
    x32 = by_root_mean_square(room.view(-1)[: x.numel()].view(x.shape).copy_(x), eps)
    if weight.dtype == torch.float32:
        return out.copy_(x32.mul_(weight))
    return out.copy_(x32).mul_(weight)


def norm_gated(
    x_THV: Tensor, weight_V: Tensor, eps: float, z_THV: Tensor, out_THV: Tensor
) -> Tensor:
    """The root-mean-square norm of each head of x times silu(z), into `out_THV`; rounded before
    either is multiplied. x is float32 and becomes anything."""
    normed_THV = rms_norm(x_THV, weight_V, eps, x_THV, out_THV)
    return out_THV.copy_(torch.mul(F.silu(z_THV.float()), normed_THV, out=x_THV))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, room: Tensor, out: Tensor
) -> Tensor:
    """Layer norm over the last dimension into `out`, which may be x; rounded once.

    `room` is float32 of at least x's size.
    """
    x32 = room.view(-1)[: x.numel()].view(x.shape).copy_(x)
    by_root_mean_square(x32.sub_(x32.mean(dim=-1, keepdim=True)), eps).mul_(weight)
    return out.copy_(x32 if bias is None else x32.add_(bias))


def activation_of(name: str) -> Activation:
    """The activation of that name; it may overwrite its argument. Raises CheckpointError."""
    if name in _IN_PLACE:
        return _IN_PLACE[name]
    from transformers.activations import ACT2FN

    try:
        function: Activation = ACT2FN[name]
    except (KeyError, ImportError) as error:
        raise CheckpointError(f"config.json: hidden_act {shown(name)} is not known") from error
    return function


def silu_in_place(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def squared_relu_in_place(x: Tensor) -> Tensor:
    """``max(x, 0)^2`` (So et al. 2021)."""
    return x.relu_().square_()


_IN_PLACE = {
    "silu": silu_in_place,
    "swish": silu_in_place,
    "relu": torch.relu_,
    "relu2": squared_relu_in_place,
}
