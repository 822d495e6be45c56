"""The gated delta rule: token by token, or by torch a chunk of a prompt at once.

Shape letters: T tokens of the micro-batch, N tokens of a chunk, G key heads, H value heads,
K size of a key, V size of a value, R rows of the state.
"""

import torch
from torch import Tensor

from moebatch.model.native import loader
from moebatch.model.native.delta_rule import DeltaInput, DeltaSpans, delta_work
from moebatch.model.native.helpers import Helpers, torch_parallel
from moebatch.model.recurrence.delta_plan import DeltaPlan
from moebatch.model.scratch import Frame

_LEAST_SHARED_NUMBERS = 2**17
"""Numbers of matrices that one thread has changed before another one would be awake."""


class DeltaRule:
    """Computes it. Owns the threads of the kernel, so one thread may use it at a time."""

    def __init__(self, device: torch.device) -> None:
        self._kernels = loader.kernels() if device.type == "cpu" else None
        self._helpers = Helpers(torch_parallel())

    def run(
        self, frame: Frame, plan: DeltaPlan, given: DeltaInput, matrices: Tensor, out_THV: Tensor
    ) -> None:
        """Changes matrices [R, H, K, V] of sequences in place, and writes what they put out; all
        float32."""
        if plan.compiled is not None:
            self._take_steps(plan.compiled, given, matrices, out_THV)
        for rows, tokens_B in plan.runs:
            one = DeltaInput(*(tensor[tokens_B] for tensor in given))
            out_THV[tokens_B] = _step(one, matrices[rows])
        for span in plan.slices:
            for tokens in span.chunks:
                some = DeltaInput(*(tensor[tokens] for tensor in given))
                _take_chunk(frame.branch(), some, matrices[span.row], out_THV[tokens])

    def _take_steps(
        self, spans: DeltaSpans, given: DeltaInput, matrices: Tensor, out_THV: Tensor
    ) -> None:
        assert self._kernels is not None, "a plan for a kernel is made where there is one"
        is_shared = len(given.v_THV) * matrices[0].numel() >= _LEAST_SHARED_NUMBERS
        work = delta_work(spans, given, matrices, out_THV)
        num_threads = torch.get_num_threads() if is_shared else 1
        self._helpers.run(self._kernels.delta_rule, work, num_threads)


def _step(given: DeltaInput, matrices_BHKV: Tensor) -> Tensor:
    """One token of each sequence, by torch: [B, H, V]."""
    num_heads = matrices_BHKV.shape[1]
    q_XK, k_XK = (_of_value_heads(x, num_heads).flatten(0, 1) for x in given[:2])
    v_XV, rates_X1, fading_X1 = (
        x.reshape(len(q_XK), -1) for x in (given.v_THV, given.rates_TH, given.fading_TH)
    )
    matrices_XKV = matrices_BHKV.flatten(0, 1)
    matrices_XKV *= fading_X1.exp()[..., None]
    found_XV = torch.bmm(k_XK[:, None], matrices_XKV)[:, 0]
    update_XV = (v_XV - found_XV) * rates_X1
    matrices_XKV.baddbmm_(k_XK[..., None], update_XV[:, None])
    return torch.bmm(q_XK[:, None], matrices_XKV).view(given.v_THV.shape)


def _take_chunk(frame: Frame, given: DeltaInput, matrix_HKV: Tensor, out_NHV: Tensor) -> None:
    """A chunk of one sequence (Yang et al. 2024, section 3.3): what its tokens change is found by
    one triangular system, in which each sees the changes of those before it."""
    num_tokens, num_heads, value_dim = given.v_THV.shape
    key_dim, rows = given.k_TGK.shape[2], (num_heads, num_tokens)
    q_HNK, k_HNK = (
        frame.take_float(*rows, key_dim).copy_(_of_value_heads(x, num_heads).transpose(0, 1))
        for x in given[:2]
    )
    fading_HN = given.fading_TH.t().cumsum(1)
    among_HNN = frame.take_float(*rows, num_tokens)
    torch.sub(fading_HN[..., None], fading_HN[:, None], out=among_HNN)
    among_HNN.masked_fill_(_is_later(num_tokens, among_HNN.device), -torch.inf).exp_()
    met_HNN, since_HN1 = frame.take_float(*rows, num_tokens), fading_HN.exp()[..., None]

    # What each would change by itself, and what it finds by its key in the matrix before the chunk.
    changes_HNX = frame.take_float(*rows, value_dim + key_dim)
    update_HNV, found_HNK = torch.split(changes_HNX, [value_dim, key_dim], dim=2)
    update_HNV.copy_(given.v_THV.transpose(0, 1))
    torch.mul(k_HNK, since_HN1, out=found_HNK)
    rates_HN1 = given.rates_TH.t()[..., None]
    changes_HNX *= rates_HN1
    torch.bmm(k_HNK, k_HNK.mT, out=met_HNN).mul_(among_HNN).mul_(rates_HN1)
    changes_HNX = torch.linalg.solve_triangular(
        met_HNN, changes_HNX, upper=False, unitriangular=True
    )
    update_HNV, found_HNK = torch.split(changes_HNX, [value_dim, key_dim], dim=2)
    update_HNV = torch.baddbmm(update_HNV, found_HNK, matrix_HKV, alpha=-1)

    torch.bmm(q_HNK, k_HNK.mT, out=met_HNN).mul_(among_HNN)
    out_HNV = torch.bmm(met_HNN, update_HNV)
    out_HNV.baddbmm_(q_HNK.mul_(since_HN1), matrix_HKV)
    out_NHV.copy_(out_HNV.transpose(0, 1))

    k_HNK *= (fading_HN[:, -1:] - fading_HN).exp_()[..., None]
    matrix_HKV *= since_HN1[:, -1:]
    matrix_HKV.baddbmm_(k_HNK.mT, update_HNV)


def _of_value_heads(x_TGK: Tensor, num_heads: int) -> Tensor:
    """Each key head as often as it serves a value head, [T, H, K]."""
    return x_TGK.repeat_interleave(num_heads // x_TGK.shape[1], dim=1)


def _is_later(num_tokens: int, device: torch.device) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).triu_(1)
