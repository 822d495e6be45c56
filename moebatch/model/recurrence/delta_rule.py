"""The gated delta rule, and the same without its correction, which is Mamba-2's recurrence: token
by token, or by torch a chunk of a prompt at once; and how a state is kept in half of its bits.

Shape letters: T tokens of the micro-batch, N tokens of a chunk, G key heads, H value heads,
K size of a key, V size of a value, R rows of the state, F one or K: numbers by which a matrix
fades.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moebatch.model.gpu.loader import delta_steps
from moebatch.model.native import loader
from moebatch.model.native.delta_rule import NOISE_STEPS, DeltaInput, StateSpans, delta_work
from moebatch.model.native.helpers import Helpers, torch_parallel
from moebatch.model.recurrence.plan import RecurrentPlan, StateRun
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import MatrixRecurrence

_LEAST_SHARED_NUMBERS = 2**17
"""Numbers of matrices that one thread has changed before another one would be awake."""
_NOTHING_LEFT = -128.0
"""A logarithm of less than any float32: no more is summed up, so that sums stay finite."""

_NOISE_BITS = 13
"""Noise is as many upper bits of 32, which float16 lacks of float32."""
_LARGEST_HALF = 65504.0


class DeltaRule:
    """Computes it. Owns the threads of the kernel, so one thread may use it at a time."""

    def __init__(self, recurrence: MatrixRecurrence, device: torch.device) -> None:
        self._corrects = recurrence.corrects
        self._kernels = loader.kernels() if device.type == "cpu" else None
        self._on_gpu = delta_steps(recurrence, device)
        self._helpers = Helpers(torch_parallel())
        self._at_once, self._chunk = recurrence.states_at_once, recurrence.chunk_tokens
        is_exact = recurrence.state_dtype == "float32"
        self._rounding = None if is_exact else _Rounding(recurrence, device)

    def run(
        self,
        frame: Frame,
        plan: RecurrentPlan,
        given: DeltaInput,
        matrices: Tensor,
        out_THV: Tensor,
    ) -> None:
        """Changes matrices [R, H, K, V] of sequences, kept as `MatrixRecurrence.state_dtype` says,
        in place, and writes what they put out, in float32.

        Kernels round those in float16 behind every token, so that they do not depend on how
        prompts are cut; torch behind every chunk.
        """
        if plan.compiled is not None:
            self._take_steps(frame, plan.compiled, given, matrices, out_THV)
        elif plan.singles is not None:
            assert self._on_gpu is not None, "a plan for a kernel is made where there is one"
            self._on_gpu.take(plan.singles, given, matrices, out_THV, corrects=self._corrects)
        else:
            for run in plan.runs:
                for part in run.parts(self._at_once):
                    self._step(frame.branch(), part, given, matrices, out_THV)
        for span in plan.slices:
            for tokens, num_before in span.chunks(self._chunk):
                some = DeltaInput(*(tensor[tokens] for tensor in given))
                own, row = frame.branch(), matrices[span.row]
                with self._in_float32(own, row, num_before) as matrix_HKV:
                    _take_chunk(own, some, matrix_HKV, out_THV[tokens], corrects=self._corrects)

    def _step(
        self, frame: Frame, run: StateRun, given: DeltaInput, matrices: Tensor, out_THV: Tensor
    ) -> None:
        one = DeltaInput(*(tensor[run.tokens_B] for tensor in given))
        befores_B = run.befores_B[:, None, None, None]
        with self._in_float32(frame, matrices[run.rows], befores_B) as some_BHKV:
            out_THV[run.tokens_B] = _step(one, some_BHKV, corrects=self._corrects)

    @contextmanager
    def _in_float32(self, frame: Frame, kept: Tensor, num_before: Tensor | int) -> Iterator[Tensor]:
        """Matrices [..., H, K, V] to be changed, which are kept as they then are, behind a token
        with so many before it."""
        if self._rounding is None:
            yield kept
            return
        matrices = frame.take_float(*kept.shape).copy_(kept)
        yield matrices
        room = frame.take_float(*kept.shape)
        self._rounding.keep(matrices, num_before, room.view(torch.int32), kept)

    def _take_steps(
        self,
        frame: Frame,
        spans: StateSpans,
        given: DeltaInput,
        matrices: Tensor,
        out_THV: Tensor,
    ) -> None:
        assert self._kernels is not None, "a plan for a kernel is made where there is one"
        is_shared = len(given.v_THV) * matrices[0].numel() >= _LEAST_SHARED_NUMBERS
        left_THF = frame.take_float(*given.fading_THF.shape)
        torch.exp(given.fading_THF, out=left_THF)
        work = delta_work(spans, given, left_THF, matrices, out_THV, corrects=self._corrects)
        num_threads = torch.get_num_threads() if is_shared else 1
        self._helpers.run(self._kernels.delta_rule, work, num_threads)


class _Rounding:
    """Of matrices [..., H, K, V] in float32 to float16, with noise of these `NOISE_STEPS`."""

    def __init__(self, recurrence: MatrixRecurrence, device: torch.device) -> None:
        heads_H11, keys_K1, values_V = (
            torch.arange(num, device=device) * step
            for num, step in (
                (recurrence.num_value_heads, NOISE_STEPS["head_step"]),
                (recurrence.key_head_dim, NOISE_STEPS["key_step"]),
                (recurrence.value_head_dim, NOISE_STEPS["value_step"]),
            )
        )
        self._noise_H11 = heads_H11[:, None, None]
        self._noise_KV = (keys_K1[:, None] + values_V).int()

    def keep(self, matrices: Tensor, num_before: Tensor | int, room: Tensor, kept: Tensor) -> None:
        """Writes them to `kept`. Changes them, and fills `room`, of as many int32."""
        noise = (self._noise_H11 + num_before * NOISE_STEPS["token_step"]).int()
        torch.add(noise, self._noise_KV, out=room).bitwise_right_shift_(32 - _NOISE_BITS)
        # What is shifted in has the sign of what is shifted.
        room.bitwise_and_(2**_NOISE_BITS - 1)
        matrices.view(torch.int32).add_(room).bitwise_and_(-(2**_NOISE_BITS))
        kept.copy_(matrices.clamp_(-_LARGEST_HALF, _LARGEST_HALF))


def _step(given: DeltaInput, matrices_BHKV: Tensor, *, corrects: bool) -> Tensor:
    """One token of each sequence, by torch: [B, H, V]."""
    num_heads = matrices_BHKV.shape[1]
    q_XK, k_XK = (_of_value_heads(x, num_heads).flatten(0, 1) for x in given[:2])
    v_XV, rates_X1, fading_XF = (
        x.reshape(len(q_XK), -1) for x in (given.v_THV, given.rates_TH, given.fading_THF)
    )
    matrices_XKV = matrices_BHKV.flatten(0, 1)
    matrices_XKV *= fading_XF.exp()[..., None]
    if corrects:
        v_XV = v_XV - torch.bmm(k_XK[:, None], matrices_XKV)[:, 0]
    update_XV = v_XV * rates_X1
    matrices_XKV.baddbmm_(k_XK[..., None], update_XV[:, None])
    return torch.bmm(q_XK[:, None], matrices_XKV).view(given.v_THV.shape)


def _take_chunk(
    frame: Frame, given: DeltaInput, matrix_HKV: Tensor, out_NHV: Tensor, *, corrects: bool
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
    if corrects:
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
