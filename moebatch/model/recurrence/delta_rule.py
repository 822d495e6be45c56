"""The gated delta rule, and the same without its correction, which is Mamba-2's recurrence: token
by token, or by torch a chunk of a prompt at once.

Shape letters: T tokens of the micro-batch, N tokens of a chunk, G key heads, H value heads,
K size of a key, V size of a value, R rows of the state, F one or K: numbers by which a matrix
fades.
"""

import torch
from torch import Tensor

from moebatch.model.gpu.delta_steps import take_delta_steps
from moebatch.model.native.delta_rule import DeltaInput, StateSpans, delta_work
from moebatch.model.native.kernels import Kernel, Kernels, Work
from moebatch.model.recurrence.matrix_rule import MatrixRule
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import MatrixRecurrence

_NOTHING_LEFT = -128.0
"""A logarithm of less than any float32: no more is summed up, so that sums stay finite."""


class DeltaRule(MatrixRule[DeltaInput]):
    """The delta rule, by a kernel where there is one, or by torch."""

    least_shared = 2**17

    def __init__(self, recurrence: MatrixRecurrence, device: torch.device) -> None:
        super().__init__(recurrence, device)
        self._corrects = recurrence.corrects

    @staticmethod
    def _compiled(kernels: Kernels) -> Kernel:
        return kernels.delta_rule

    def _work(
        self, frame: Frame, spans: StateSpans, given: DeltaInput, matrices: Tensor, out: Tensor
    ) -> Work:
        left_THF = frame.take_float(*given.fading_THF.shape)
        torch.exp(given.fading_THF, out=left_THF)
        return delta_work(spans, given, left_THF, matrices, out, corrects=self._corrects)

    def _take_on_gpu(
        self, spans: StateSpans, given: DeltaInput, matrices: Tensor, out: Tensor
    ) -> None:
        take_delta_steps(spans, given, matrices, out, corrects=self._corrects)

    def _step(self, frame: Frame, given: DeltaInput, matrices_BHKV: Tensor) -> Tensor:
        """One token of each sequence, by torch: [B, H, V]."""
        num_heads = matrices_BHKV.shape[1]
        q_XK, k_XK = (_of_value_heads(x, num_heads).flatten(0, 1) for x in given[:2])
        v_XV, rates_X1, fading_XF = (
            x.reshape(len(q_XK), -1) for x in (given.v_THV, given.rates_TH, given.fading_THF)
        )
        matrices_XKV = matrices_BHKV.flatten(0, 1)
        matrices_XKV *= fading_XF.exp()[..., None]
        if self._corrects:
            v_XV = v_XV - torch.bmm(k_XK[:, None], matrices_XKV)[:, 0]
        update_XV = v_XV * rates_X1
        matrices_XKV.baddbmm_(k_XK[..., None], update_XV[:, None])
        return torch.bmm(q_XK[:, None], matrices_XKV).view(given.v_THV.shape)

    def _take_chunk(
        self, frame: Frame, given: DeltaInput, matrix_HKV: Tensor, out_NHV: Tensor
    ) -> None:
        """A chunk of one sequence (Yang et al. 2024, section 3.3; Dao & Gu 2024, section 6)."""
        num_tokens, num_heads, value_dim = given.v_THV.shape
        key_dim, rows = given.k_TGK.shape[2], (num_heads, num_tokens)
        q_HNK, k_HNK = (
            frame.take_float(*rows, key_dim).copy_(_of_value_heads(x, num_heads).transpose(0, 1))
            for x in given[:2]
        )
        fading_HNF = given.fading_THF.transpose(0, 1).clamp(min=_NOTHING_LEFT).cumsum(1)
        among_HNNF = _among(frame, fading_HNF, k_HNK)
        met_HNN, since_HNF = frame.take_float(*rows, num_tokens), fading_HNF.exp()

        rates_HN1, v_HNV = given.rates_TH.t()[..., None], given.v_THV.transpose(0, 1)
        if self._corrects:
            _met(k_HNK, k_HNK, among_HNNF, met_HNN).mul_(rates_HN1)
            changes_HNX = frame.take_float(*rows, value_dim + key_dim)
            torch.cat([v_HNV, k_HNK * since_HNF], 2, out=changes_HNX)
            changes_HNX *= rates_HN1
            update_HNV = _solved(met_HNN, changes_HNX, matrix_HKV)
        else:
            update_HNV = v_HNV * rates_HN1

        _met(q_HNK, k_HNK, among_HNNF, met_HNN)
        out_HNV = torch.bmm(met_HNN, update_HNV)
        out_HNV.baddbmm_(q_HNK.mul_(since_HNF), matrix_HKV)
        out_NHV.copy_(out_HNV.transpose(0, 1))

        k_HNK *= (fading_HNF[:, -1:] - fading_HNF).exp_()
        matrix_HKV *= since_HNF[:, -1, :, None]
        matrix_HKV.baddbmm_(k_HNK.mT, update_HNV)


def _among(frame: Frame, fading_HNF: Tensor, k_HNK: Tensor) -> Tensor:
    """What is left of each token when each other one comes, [H, N, N, F]: nothing of later ones.
    By differences, since a logarithm of what is left of a chunk may be too low for both of its
    factors. Of channels that fade apart, what is left of the key."""
    num_heads, num_tokens, num_fading = fading_HNF.shape
    among_HNNF = frame.take_float(num_heads, num_tokens, num_tokens, num_fading)
    torch.sub(fading_HNF[:, :, None], fading_HNF[:, None], out=among_HNNF)
    is_later_NN1 = _is_later(num_tokens, among_HNNF.device)[..., None]
    among_HNNF.masked_fill_(is_later_NN1, -torch.inf).exp_()
    return among_HNNF if num_fading == 1 else among_HNNF.mul_(k_HNK[:, None])


def _met(x_HNK: Tensor, k_HNK: Tensor, among_HNNF: Tensor, met_HNN: Tensor) -> Tensor:
    """Products with keys of tokens before and their own, as far as these are left, [H, N, N]."""
    if among_HNNF.shape[3] == 1:
        return torch.bmm(x_HNK, k_HNK.mT, out=met_HNN).mul_(among_HNNF[..., 0])
    column_X1 = met_HNN.view(-1, met_HNN.shape[2], 1)
    torch.bmm(among_HNNF.flatten(0, 1), x_HNK.flatten(0, 1)[..., None], out=column_X1)
    return met_HNN


def _solved(met_HNN: Tensor, changes_HNX: Tensor, matrix_HKV: Tensor) -> Tensor:
    """What tokens add, [H, N, V]: found by one triangular system, in which each sees what those
    before it add; given what each would by itself, with what it finds by its key in the matrix
    before the chunk beside it."""
    changes_HNX = torch.linalg.solve_triangular(
        met_HNN, changes_HNX, upper=False, unitriangular=True
    )
    _, key_dim, value_dim = matrix_HKV.shape
    update_HNV, found_HNK = torch.split(changes_HNX, [value_dim, key_dim], dim=2)
    return torch.baddbmm(update_HNV, found_HNK, matrix_HKV, alpha=-1)


def _of_value_heads(x_TGK: Tensor, num_heads: int) -> Tensor:
    """Each key head as often as it serves a value head, [T, H, K]."""
    return x_TGK.repeat_interleave(num_heads // x_TGK.shape[1], dim=1)


def _is_later(num_tokens: int, device: torch.device) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).triu_(1)
