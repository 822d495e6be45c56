"""Layers of Mamba-1 with norms (Jamba): what their rule is given, what becomes of what it puts out,
and the rule itself: token by token, or by torch a chunk of a prompt at once.

Shape letters: T tokens of the micro-batch, N rows after bucketing or tokens of a chunk, B
sequences, P projected width, S width of what is selected by, C its numbers for lengths of steps, K
size of a key, V channels of values, R rows of the state.
"""

import torch
from torch import Tensor

from moebatch.model.gpu.scan_steps import take_scan_steps
from moebatch.model.layer_work import LayerWork
from moebatch.model.layers import silu_in_place
from moebatch.model.native.delta_rule import StateSpans
from moebatch.model.native.kernels import Kernel, Kernels, Work
from moebatch.model.native.selective_scan import ScanInput, scan_work
from moebatch.model.operators import Operators
from moebatch.model.recurrence.block import RecurrentBlock
from moebatch.model.recurrence.matrix_rule import MatrixRule
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import SelectiveScan
from moebatch.spec.model.shape import ModelShape


class SelectiveScanBlock(RecurrentBlock):
    """Matrices whose numbers fade apart (Gu & Dao 2023; AI21 2024)."""

    def __init__(self, shape: ModelShape, recurrence: SelectiveScan, operators: Operators) -> None:
        super().__init__(shape, recurrence, operators)
        self._scan, self._rule = recurrence, ScanRule(recurrence, operators.device)
        self._zero = torch.zeros((), device=operators.device)

    def _mix(self, work: LayerWork, projected_NP: Tensor, out_TX: Tensor) -> None:
        scan, weights, num_tokens = self._scan, work.weights, work.num_tokens
        x_TV, z_TV = projected_NP[:num_tokens].chunk(2, dim=1)
        mixed_TV = self._convolution.run(work, x_TV)
        given = self._given(work, mixed_TV, len(projected_NP))
        made_TV = work.frame.take_float(num_tokens, scan.value_width)
        matrices = work.parts[0].view(-1, 1, scan.key_head_dim, scan.value_width)
        self._rule.run(work.frame, work.recurrent, given, matrices, made_TV)
        made_TV.addcmul_(mixed_TV, weights["recurrent_skip"].float())
        gates_TV = silu_in_place(given.lengths_TV.copy_(z_TV))
        torch.mul(made_TV, gates_TV, out=out_TX)

    def _given(self, work: LayerWork, mixed_TV: Tensor, num_rows: int) -> ScanInput:
        """What tokens are selected by is projected of them, and normed: once more of it lengths of
        their time steps."""
        scan, frame, weights = self._scan, work.frame, work.weights
        num_tokens, keys = len(mixed_TV), scan.key_head_dim
        x_NV = frame.take(num_rows, scan.value_width)
        x_NV[:num_tokens] = mixed_TV
        selecting_NS = self._products.of_role(frame, x_NV, weights, "scan_select")
        c_NC, k_NK, q_NK = torch.split(selecting_NS, [scan.rank, keys, keys], dim=1)
        for x_NX, role in ((c_NC, "step"), (k_NK, "key"), (q_NK, "query")):
            self._elementwise.norm(frame, x_NX, weights[f"scan_{role}_norm"], self._eps)
        c_NC = frame.take(*c_NC.shape).copy_(c_NC)
        steps_NV = self._products.of_role(frame, c_NC, weights, "scan_step")
        lengths_TV = frame.take_float(*mixed_TV.shape).copy_(steps_NV[:num_tokens])
        lengths_TV += weights["recurrent_step"]
        decays_KV = frame.take_float(keys, scan.value_width)
        k_TK, q_TK = (
            frame.take_float(num_tokens, keys).copy_(x_NK[:num_tokens]) for x_NK in (k_NK, q_NK)
        )
        return ScanInput(
            q_TK=q_TK,
            k_TK=k_TK,
            v_TV=mixed_TV,
            lengths_TV=torch.logaddexp(lengths_TV, self._zero, out=lengths_TV),
            decays_KV=torch.exp(weights["recurrent_decay"].t(), out=decays_KV).neg_(),
        )


class ScanRule(MatrixRule[ScanInput]):
    """The selective scan, by a kernel where there is one, or by torch."""

    least_shared = 2**15

    def _take_on_gpu(
        self, spans: StateSpans, given: ScanInput, matrices: Tensor, out: Tensor
    ) -> None:
        take_scan_steps(spans, given, matrices, out)

    @staticmethod
    def _compiled(kernels: Kernels) -> Kernel:
        return kernels.selective_scan

    def _work(
        self, frame: Frame, spans: StateSpans, given: ScanInput, matrices: Tensor, out: Tensor
    ) -> Work:
        return scan_work(spans, given, matrices, out)

    def _step(self, frame: Frame, given: ScanInput, matrices_B1KV: Tensor) -> Tensor:
        matrices_BKV = matrices_B1KV[:, 0]
        matrices_BKV *= _left(frame, given)
        added_B1V = (given.v_TV * given.lengths_TV)[:, None]
        matrices_BKV.addcmul_(given.k_TK[..., None], added_B1V)
        return torch.bmm(given.q_TK[:, None], matrices_BKV)[:, 0]

    def _take_chunk(
        self, frame: Frame, given: ScanInput, matrix_1KV: Tensor, out_NV: Tensor
    ) -> None:
        """By a parallel scan: behind each round, matrices have seen twice as many tokens (Hillis &
        Steele 1986). No number of it grows, however fast numbers fade."""
        left_NKV = _left(frame, given)
        seen_NKV, room_NKV = (frame.take_float(*left_NKV.shape) for _ in "sr")
        added_N1V = (given.v_TV * given.lengths_TV)[:, None]
        torch.mul(given.k_TK[..., None], added_N1V, out=seen_NKV)
        seen_NKV[0].addcmul_(left_NKV[0], matrix_1KV[0])
        num_seen = 1
        while num_seen < len(seen_NKV):
            later, before = slice(num_seen, None), slice(-num_seen)
            seen_NKV[later] += torch.mul(left_NKV[later], seen_NKV[before], out=room_NKV[later])
            torch.mul(left_NKV[later], left_NKV[before], out=room_NKV[later])
            left_NKV[later] = room_NKV[later]
            num_seen *= 2
        torch.bmm(given.q_TK[:, None], seen_NKV, out=out_NV[:, None])
        matrix_1KV[0] = seen_NKV[-1]


def _left(frame: Frame, given: ScanInput) -> Tensor:
    """What each token leaves of each number, [N, K, V]."""
    left_NKV = frame.take_float(len(given.v_TV), *given.decays_KV.shape)
    return torch.mul(given.lengths_TV[:, None], given.decays_KV, out=left_NKV).exp_()
