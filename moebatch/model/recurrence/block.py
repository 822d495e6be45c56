"""A layer that recurs, between the norm of its input and what it adds to the hidden states.

Shape letters: T tokens of the micro-batch, N rows after bucketing, D hidden, P projected width,
M channels of the convolution, W tokens that it sees, L those before the newest one, B sequences,
R rows of the state, X width of what is projected back, H value heads, V size of a value.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model.layer_work import LayerWork
from moebatch.model.native import loader
from moebatch.model.native.delta_rule import DeltaInput, conv_work
from moebatch.model.native.kernels import threads_for
from moebatch.model.operators import Operators
from moebatch.model.recurrence.delta_rule import DeltaRule
from moebatch.spec.model.recurrence import CHUNK_TOKENS, MatrixRecurrence, Recurrence
from moebatch.spec.model.shape import ModelShape

_LEAST_SHARED_BYTES = 2**17
"""What one thread has written before another one would be awake."""


class Convolution:
    """Short and causal, over the channels of tokens, with silu where it `activates`."""

    def __init__(self, device: torch.device, *, activates: bool) -> None:
        self._activates = activates
        self._kernels = loader.kernels() if device.type == "cpu" else None

    def run(self, work: LayerWork, x_TM: Tensor) -> Tensor:
        """[T, M] float32, rounded as `x_TM` is; the last inputs of each sequence take the place of
        those before."""
        frame, plan, seen_RLM = work.frame, work.recurrent, work.parts[-1]
        weight_M1W, bias_M = work.weights["recurrent_conv"], work.weights.get("recurrent_conv_bias")
        out_TM = frame.take_float(*x_TM.shape)
        taps_WM = frame.take_float(weight_M1W.shape[2], len(weight_M1W))
        taps_WM.copy_(weight_M1W[:, 0].t())
        if bias_M is not None:
            bias_M = frame.take_float(len(bias_M)).copy_(bias_M)
        if plan.compiled is not None:
            assert self._kernels is not None, "a plan for a kernel is made where there is one"
            convolving = conv_work(
                plan.compiled, x_TM, taps_WM, bias_M, seen_RLM, out_TM, activates=self._activates
            )
            num_threads = threads_for(out_TM.nbytes, _LEAST_SHARED_BYTES)
            self._kernels.convolve(convolving, num_threads)
            return out_TM
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
        return out_TM

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


class RecurrentBlock(ABC):
    """What kinds of recurrence share: both projections, and the convolution where there is one."""

    activates = True
    """silu follows the convolution."""

    def __init__(self, shape: ModelShape, recurrence: Recurrence, operators: Operators) -> None:
        self._recurrence = recurrence
        self._eps = shape.rms_eps
        self._products, self._elementwise = operators
        self._convolution = Convolution(operators.device, activates=self.activates)

    def run(self, work: LayerWork) -> Tensor:
        """What it adds to the hidden states, [N, D]; rows beyond the micro-batch hold garbage.

        Changes the state of all sequences of the plan: parts as `Recurrence.state` names them.
        """
        frame, weights = work.frame, work.weights
        for part in work.parts:
            part.index_fill_(0, work.recurrent.begun_B, 0)
        projected_NP = self._products.of_role(frame, work.normed_ND, weights, "recurrent_in")
        out_NX = frame.take(len(projected_NP), self._recurrence.output_width)
        self._mix(work, projected_NP, out_NX[: work.num_tokens])
        return self._products.of_role(frame, out_NX, weights, "recurrent_out")

    @abstractmethod
    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        """Writes what is projected back, of which tokens of a sequence have part in each other.
        `projected_NP` may become anything."""


class ShortConvolutionBlock(RecurrentBlock):
    """A gated convolution and no more (LFM2): what goes in is multiplied, and what comes out."""

    activates = False

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        before_TD, behind_TD, x_TD = projected_NP[: work.num_tokens].chunk(3, dim=1)
        x_TD *= before_TD
        torch.mul(self._convolution.run(work, x_TD), behind_TD, out=out_TX)


class MatrixBlock(RecurrentBlock):
    """What kinds share whose states hold matrices."""

    def __init__(
        self, shape: ModelShape, recurrence: MatrixRecurrence, operators: Operators
    ) -> None:
        super().__init__(shape, recurrence, operators)
        self._matrix, self._rule = recurrence, DeltaRule(recurrence, operators.device)

    def _put_out(self, work: LayerWork, given: DeltaInput) -> Tensor:
        """[T, H, V] float32, which matrices put out as they change."""
        sizes = self._matrix.num_value_heads, self._matrix.key_head_dim, self._matrix.value_head_dim
        made_THV = work.frame.take_float(*given.v_THV.shape)
        self._rule.run(work.frame, work.recurrent, given, work.parts[0].view(-1, *sizes), made_THV)
        return made_THV
