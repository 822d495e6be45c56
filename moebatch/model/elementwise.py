"""What is done with hidden states between the matrix products.

By the compiled kernels where they can, in one way through memory each; by torch elsewhere. The
results are the same: in bfloat16 bit for bit but for norms, whose sums run in another order.

Shape letters: T tokens of the pass, M tokens of one expert or of a chunk, D hidden, F MLP width,
K experts per token, H heads, C head size, R pairs of a head that rotate.
"""

import math

import torch
from torch import Tensor

from moebatch.model import layers, rope
from moebatch.model.native import loader
from moebatch.model.native.helpers import Helpers, torch_parallel
from moebatch.model.native.kernels import Kernel
from moebatch.model.native.rows import RowWork, row_work, suits
from moebatch.model.routing.router import ExpertTokens
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate

_LEAST_SHARED_BYTES = 2**17
"""What one thread has written before another one would be awake."""


class Elementwise:
    """Owns the threads of the kernels, so one thread may use it at a time."""

    def __init__(
        self,
        activation: str,
        device: torch.device,
        clamped: ClampedGate | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        """`clamped` says what gates do otherwise, `residual_scale` by what sums are multiplied that
        are added. Raises CheckpointError for activations that are not known."""
        self._clamped = clamped
        self._residual_scale = residual_scale
        self._activation = layers.activation_of(activation)
        self._is_silu = self._activation is layers.silu_in_place
        self._kernels = loader.kernels() if device.type == "cpu" else None
        self._helpers = Helpers(torch_parallel())

    def gate(self, gate_MF: Tensor, up_MF: Tensor) -> None:
        """``activation(gate) * up``, or what a `ClampedGate` says, in place of the gate; of the
        latter up may become anything."""
        if self._clamped is not None:
            self._gate_clamped(self._clamped, gate_MF, up_MF)
            return
        if self._kernels is None or not self._is_silu or not suits(gate_MF, up_MF):
            torch.mul(self._activation(gate_MF), up_MF, out=gate_MF)
            return
        num_rows, width = gate_MF.shape
        work = row_work(gate_MF, up_MF, num_rows=num_rows, width=width)
        self._run(self._kernels.gate, work, gate_MF)

    def activate(self, x_MF: Tensor) -> None:
        """``activation(x)`` in its place, where there is no gate."""
        activated_MF = self._activation(x_MF)
        if activated_MF is not x_MF:
            x_MF.copy_(activated_MF)

    def _gate_clamped(self, clamped: ClampedGate, gate_MF: Tensor, up_MF: Tensor) -> None:
        limit, alpha = clamped.limit, clamped.alpha
        if self._kernels is None or not suits(gate_MF, up_MF):
            up_MF.clamp_(-limit, limit).add_(1)
            # In place: x * sigmoid(alpha * x) is silu(alpha * x) / alpha.
            gate_MF.clamp_(max=limit).mul_(alpha)
            layers.silu_in_place(gate_MF).div_(alpha).mul_(up_MF)
            return
        num_rows, width = gate_MF.shape
        work = row_work(gate_MF, up_MF, num_rows=num_rows, width=width, limit=limit, alpha=alpha)
        self._run(self._kernels.gate_clamped, work, gate_MF)

    def place(
        self, y_MD: Tensor, tokens: ExpertTokens, outputs_TKD: Tensor, weights_TK: Tensor
    ) -> None:
        """Weighs what an expert made of tokens and puts it into the outputs of all."""
        (rows_M, choices_M), (_, num_choices, width) = tokens, outputs_TKD.shape
        assert weights_TK.dtype == torch.float32, "weights of a routing are float32"
        if self._kernels is None or not suits(outputs_TKD, y_MD) or not suits(weights_TK):
            y_MD = y_MD.mul_(weights_TK[rows_M, choices_M][:, None])
            places_M = rows_M * num_choices + choices_M
            outputs_TKD.flatten(0, 1).index_copy_(0, places_M, y_MD)
            return
        rows_M, choices_M = rows_M.contiguous(), choices_M.contiguous()
        work = row_work(
            outputs_TKD,
            y_MD,
            num_rows=y_MD.shape[0],
            num_parts=num_choices,
            width=width,
            rows=rows_M.data_ptr(),
            choices=choices_M.data_ptr(),
            weights=weights_TK.data_ptr(),
        )
        self._run(self._kernels.place, work, y_MD)

    def add(self, frame: Frame, x_MD: Tensor, *parts: Tensor) -> None:
        """Adds to x, in place, the scaled sum of parts [M, D] or [M, K, D], taken in their order in
        float32; it is rounded before it is scaled, and before it is added."""
        self._add(frame, x_MD, self._residual_scale, *parts)

    def sum(self, frame: Frame, *parts: Tensor) -> Tensor:
        """That sum by itself, [M, D], as it is."""
        sum_MD = frame.take(len(parts[0]), parts[0].shape[-1]).zero_()
        self._add(frame, sum_MD, 1.0, *parts)
        return sum_MD

    def _add(self, frame: Frame, x_MD: Tensor, scale: float, *parts: Tensor) -> None:
        first, second = parts[0], parts[1] if len(parts) > 1 else None
        if self._kernels is None or not suits(x_MD, first, second):
            _add_by_torch(frame, x_MD, scale, first, second)
            return
        num_rows, width = x_MD.shape
        num_parts = first.shape[1] if first.dim() == 3 else 1
        work = row_work(
            x_MD,
            first,
            second,
            num_rows=num_rows,
            num_parts=num_parts,
            width=width,
            scale=scale,
        )
        self._run(self._kernels.add, work, x_MD)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, room: Tensor, out: Tensor) -> Tensor:
        """As `layers.rms_norm`; `room` is for torch alone."""
        is_exact = weight.dtype == torch.float32
        suit = suits(x[:1], out[:1]) and x.stride() == out.stride()
        suit = suit and suits(weight) and (is_exact or weight.dtype == x.dtype)
        if self._kernels is None or not suit:
            return layers.rms_norm(x, weight, eps, room, out)
        work = row_work(
            out,
            x,
            weight,
            num_rows=len(x),
            num_parts=math.prod(x.shape[1:-1]),
            width=x.shape[-1],
            stride=x.stride(0),
            eps=eps,
            is_exact=is_exact,
        )
        self._run(self._kernels.norm, work, out)
        return out

    def rotate(self, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> None:
        """As `rope.rotate`."""
        suit = suits(x_THC[:1, 0], cos_TR, sin_TR)
        if self._kernels is None or not suit:
            rope.rotate(x_THC, cos_TR, sin_TR)
            return
        num_rows, num_heads, _ = x_THC.shape
        work = row_work(
            x_THC,
            cos_TR,
            sin_TR,
            num_rows=num_rows,
            num_parts=num_heads,
            width=cos_TR.shape[1],
            stride=x_THC.stride(0),
            part_stride=x_THC.stride(1),
        )
        self._run(self._kernels.rotate, work, x_THC)

    def _run(self, kernel: Kernel, work: RowWork, written: Tensor) -> None:
        if written.numel():
            shared = written.nbytes >= _LEAST_SHARED_BYTES
            self._helpers.run(kernel, work, torch.get_num_threads() if shared else 1)


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
