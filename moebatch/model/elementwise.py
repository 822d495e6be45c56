"""What is done with hidden states between the matrix products.

By kernels where they can, in one way through memory each: compiled ones on a CPU, those in Triton
on a GPU; by torch elsewhere. The results are the same: in bfloat16 bit for bit but for norms, whose
sums run in another order.

Shape letters: T tokens of the pass, M tokens of one expert or of a chunk, D hidden, F MLP width,
K experts per token, H heads, C head size, V that of values, R pairs of a head that rotate.
"""

from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from moebatch.model import layers, rope
from moebatch.model.gpu import loader as gpu
from moebatch.model.gpu.rows import GpuRows
from moebatch.model.native import loader as native
from moebatch.model.native.rows import NativeRows
from moebatch.model.routing.tokens import ExpertTokens
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate


class RowKernels(Protocol):
    """Of tensors whose rows suit them."""

    def suits(self, *tensors: Tensor | None) -> bool:
        """Whether rows of these can be gone through together: without gaps, of one type that is
        known."""

    def gate(self, gate_MF: Tensor, up_MF: Tensor, clamped: ClampedGate | None) -> None:
        """SwiGLU in place of the gate."""

    def place(
        self, y_MD: Tensor, tokens: ExpertTokens, outputs_TKD: Tensor, weights_TK: Tensor
    ) -> None:
        """Weighs rows, and puts each where its choice stands."""

    def add(self, x_MD: Tensor, scale: float, first: Tensor, second: Tensor | None) -> None:
        """Adds the scaled sum of the parts of each row to it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """As `layers.rms_norm`, of rows that lie alike in both. The weight may be in float32."""

    def norm_gated(
        self, x_THV: Tensor, weight_V: Tensor, eps: float, z_THV: Tensor, out_THV: Tensor
    ) -> None:
        """As `layers.norm_gated`."""

    def rotate(self, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
        """As `rope.rotate`."""


class Elementwise:
    """Goes through rows by compiled kernels where there are such for the device, or by torch."""

    def __init__(self, activation: str, device: torch.device) -> None:
        """Raises CheckpointError for activations that are not known."""
        self._clamped: ClampedGate | None = None
        self._activation = layers.activation_of(activation)
        self._kernels = _kernels_on(device)

    def clamping(self, clamped: ClampedGate | None) -> "Elementwise":
        """The same whose gates do that."""
        if clamped == self._clamped:
            return self
        other = copy(self)
        other._clamped = clamped
        return other

    def gate(self, gate_MF: Tensor, up_MF: Tensor) -> None:
        """``activation(gate) * up``, or what a `ClampedGate` says, in place of the gate; of the
        latter up may become anything."""
        clamped = self._clamped
        is_swiglu = clamped is not None or self._activation is layers.silu_in_place
        if is_swiglu and (kernels := self._kernels_for(gate_MF, up_MF)):
            kernels.gate(gate_MF, up_MF, clamped)
            return
        if clamped is None:
            torch.mul(self._activation(gate_MF), up_MF, out=gate_MF)
            return
        up_MF.clamp_(-clamped.limit, clamped.limit).add_(clamped.added)
        # In place: x * sigmoid(alpha * x) is silu(alpha * x) / alpha.
        gate_MF.clamp_(max=clamped.most_gate).mul_(clamped.alpha)
        layers.silu_in_place(gate_MF).div_(clamped.alpha)
        gate_MF.clamp_(max=clamped.most_activated).mul_(up_MF)

    def activate(self, x_MF: Tensor) -> None:
        """``activation(x)`` in its place, where there is no gate."""
        activated_MF = self._activation(x_MF)
        if activated_MF is not x_MF:
            x_MF.copy_(activated_MF)

    def place(
        self, y_MD: Tensor, tokens: ExpertTokens, outputs_TKD: Tensor, weights_TK: Tensor
    ) -> None:
        """Weighs what an expert made of tokens and puts it into the outputs of all."""
        assert weights_TK.dtype == torch.float32, "weights of a routing are float32"
        kernels = self._kernels_for(outputs_TKD, y_MD)
        if kernels and kernels.suits(weights_TK):
            kernels.place(y_MD, tokens, outputs_TKD, weights_TK)
            return
        rows_M, choices_M = tokens
        y_MD = y_MD.mul_(weights_TK[rows_M, choices_M][:, None])
        places_M = rows_M * outputs_TKD.shape[1] + choices_M
        outputs_TKD.flatten(0, 1).index_copy_(0, places_M, y_MD)

    def add(
        self,
        frame: Frame,
        x_MD: Tensor,
        first: Tensor,
        second: Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """Adds to x, in place, the scaled sum of one or two parts, [M, D] or [M, K, D] and [M, D],
        taken in their order in float32; it is rounded before it is scaled, and before it is
        added."""
        if kernels := self._kernels_for(x_MD, first, second):
            kernels.add(x_MD, scale, first, second)
        else:
            _add_by_torch(frame, x_MD, scale, first, second)

    def sum(self, frame: Frame, first: Tensor, second: Tensor | None = None) -> Tensor:
        """That sum by itself, [M, D], as it is."""
        sum_MD = frame.take(len(first), first.shape[-1]).zero_()
        self.add(frame, sum_MD, first, second)
        return sum_MD

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, room: Tensor, out: Tensor) -> Tensor:
        """As `layers.rms_norm`; `room` is for torch alone."""
        if self._is_normed(x, weight, eps, out):
            return out
        return layers.rms_norm(x, weight, eps, room, out)

    def norm(
        self, frame: Frame, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> None:
        """That norm into `out`, in place if None; torch takes room of the frame for it."""
        out = x if out is None else out
        if not self._is_normed(x, weight, eps, out):
            layers.rms_norm(x, weight, eps, frame.branch().take_float(*x.shape), out)

    def norm_gated(
        self, x_THV: Tensor, weight_V: Tensor, eps: float, z_THV: Tensor, out_THV: Tensor
    ) -> None:
        """As `layers.norm_gated`."""
        kernels, is_exact = self._kernels_for(x_THV), x_THV.dtype == torch.float32
        if kernels and is_exact and kernels.suits(weight_V, z_THV[:1], out_THV):
            kernels.norm_gated(x_THV, weight_V, eps, z_THV, out_THV)
        else:
            layers.norm_gated(x_THV, weight_V, eps, z_THV, out_THV)

    def rotate(self, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
        """As `rope.rotate`."""
        if kernels := self._kernels_for(x_THC[:1, 0], cos_TR, sin_TR):
            kernels.rotate(x_THC, cos_TR, sin_TR)
        else:
            rope.rotate(x_THC, cos_TR, sin_TR)

    def _kernels_for(self, *tensors: Tensor | None) -> RowKernels | None:
        """Where they suit; what does not is left to torch."""
        kernels = self._kernels
        return kernels if kernels is not None and kernels.suits(*tensors) else None

    def _is_normed(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        """Whether a kernel has done it."""
        kernels, is_alike = self._kernels_for(x[:1], out[:1]), x.stride() == out.stride()
        is_known = weight.dtype in (torch.float32, x.dtype)
        if kernels is None or not is_alike or not is_known or not kernels.suits(weight):
            return False
        kernels.rms_norm(x, weight, eps, out)
        return True


def _kernels_on(device: torch.device) -> RowKernels | None:
    if device.type != "cpu":
        return GpuRows() if gpu.are_for(device) else None
    kernels = native.kernels()
    return NativeRows(kernels) if kernels else None


def _add_by_torch(
    frame: Frame, x_MD: Tensor, scale: float, first: Tensor, second: Tensor | None
) -> None:
    if first.dim() == 2 and second is None:
        x_MD += first if scale == 1 else first * scale
        return
    sum_MD = frame.take_float(*x_MD.shape)
    first_MKD = first if first.dim() == 3 else first[:, None]
    torch.sum(first_MKD, 1, dtype=torch.float32, out=sum_MD)
    if second is not None:
        sum_MD += second
    added_MD = sum_MD.to(x_MD.dtype)
    x_MD += added_MD if scale == 1 else added_MD.mul_(scale)
