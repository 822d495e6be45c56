"""Short causal convolutions over the channels of tokens, with what was seen before in a state.

Shape letters: T tokens of the micro-batch, M channels, W tokens that a convolution sees, L those
before the newest one, B sequences, R rows of the state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model.native import loader
from moebatch.model.native.delta_rule import conv_work
from moebatch.model.native.helpers import Helpers, torch_parallel
from moebatch.model.recurrence.plan import RecurrentPlan
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import CHUNK_TOKENS

_LEAST_SHARED_BYTES = 2**17
"""What one thread has written before another one would be awake."""


class Convolution:
    """Computes them, and silu where one `activates`. Owns the threads of the kernel, so one thread
    may use it at a time."""

    def __init__(self, device: torch.device, *, activates: bool) -> None:
        self._activates = activates
        self._kernels = loader.kernels() if device.type == "cpu" else None
        self._helpers = Helpers(torch_parallel())

    def run(
        self,
        frame: Frame,
        plan: RecurrentPlan,
        x_TM: Tensor,
        weight_M1W: Tensor,
        bias_M: Tensor | None,
        seen_RLM: Tensor,
        out_TM: Tensor,
    ) -> None:
        """Writes float32 numbers that are rounded as `x_TM` is; the last inputs of each sequence
        take the place of those before."""
        taps_WM = frame.take_float(weight_M1W.shape[2], len(weight_M1W))
        taps_WM.copy_(weight_M1W[:, 0].t())
        if bias_M is not None:
            bias_M = frame.take_float(len(bias_M)).copy_(bias_M)
        if plan.compiled is not None:
            assert self._kernels is not None, "a plan for a kernel is made where there is one"
            work = conv_work(
                plan.compiled, x_TM, taps_WM, bias_M, seen_RLM, out_TM, activates=self._activates
            )
            num_threads = torch.get_num_threads() if out_TM.nbytes >= _LEAST_SHARED_BYTES else 1
            self._helpers.run(self._kernels.convolve, work, num_threads)
            return
        num_kept = seen_RLM.shape[1]
        for rows, tokens_B, _ in plan.runs:
            seen_BWM = torch.cat([seen_RLM[rows], x_TM[tokens_B][:, None]], 1)
            out_TM[tokens_B] = self._convolved(seen_BWM, taps_WM, bias_M)[:, 0]
            seen_RLM[rows] = seen_BWM[:, 1:]
        for span in plan.slices:
            for tokens, _ in span.chunks(CHUNK_TOKENS):
                seen_XM = torch.cat([seen_RLM[span.row], x_TM[tokens]])
                out_TM[tokens] = self._convolved(seen_XM[None], taps_WM, bias_M)[0]
                seen_RLM[span.row] = seen_XM[-num_kept:]

    def _convolved(self, seen_BXM: Tensor, taps_WM: Tensor, bias_M: Tensor | None) -> Tensor:
        """Of tokens that have seen enough, [B, X - L, M] float32."""
        num_tokens = seen_BXM.shape[1] - len(taps_WM) + 1
        sum_BTM = seen_BXM[:, :num_tokens] * taps_WM[0]
        for w in range(1, len(taps_WM)):
            sum_BTM += seen_BXM[:, w : w + num_tokens] * taps_WM[w]
        if bias_M is not None:
            sum_BTM += bias_M
        rounded_BTM = sum_BTM.to(seen_BXM.dtype)
        return (F.silu(rounded_BTM) if self._activates else rounded_BTM).float()
