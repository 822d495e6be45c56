"""What rules share by which tokens change the matrices of sequences: who takes which tokens, and
how a state is kept in half of its bits.

Shape letters: B sequences, H value heads, K size of a key, V size of a value, R rows of the state.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from moebatch.model.native import loader
from moebatch.model.native.delta_rule import NOISE_STEPS, StateSpans
from moebatch.model.native.kernels import Kernel, Kernels, Work, threads_for
from moebatch.model.recurrence.plan import RecurrentPlan, StateRun
from moebatch.model.scratch import Frame
from moebatch.spec.model.recurrence import MatrixRecurrence

_NOISE_BITS = 13
"""Noise is as many upper bits of 32, which float16 lacks of float32."""
_LARGEST_HALF = 65504.0


class RuleInput(Protocol):
    """What a rule takes of the tokens of a micro-batch."""

    def of_tokens(self, tokens: slice | Tensor) -> Self:
        """The same of some of them."""


Given = TypeVar("Given", bound=RuleInput)


class MatrixRule(ABC, Generic[Given]):
    """Takes tokens in by matrices that they change."""

    least_shared: int
    """Numbers of matrices that one thread has changed before another one would be awake."""

    def __init__(self, recurrence: MatrixRecurrence, device: torch.device) -> None:
        self._kernels = loader.kernels() if device.type == "cpu" else None
        self._at_once, self._chunk = recurrence.states_at_once, recurrence.chunk_tokens
        self._is_scanned = recurrence.is_scanned
        is_exact = recurrence.state_dtype == "float32"
        self._rounding = None if is_exact else _Rounding(recurrence, device)

    def run(
        self, frame: Frame, plan: RecurrentPlan, given: Given, matrices: Tensor, out: Tensor
    ) -> None:
        """Changes matrices [R, H, K, V] of sequences, kept as `MatrixRecurrence.state_dtype` says,
        in place, and writes what they put out, in float32.

        Kernels round those in float16 behind every token, so that they do not depend on how
        prompts are cut; torch behind every chunk.
        """
        if plan.compiled is not None:
            assert self._kernels is not None, "a plan for a kernel is made where there is one"
            work = self._work(frame, plan.compiled, given, matrices, out)
            num_threads = threads_for(len(out) * matrices[0].numel(), self.least_shared)
            self._compiled(self._kernels)(work, num_threads)
        elif plan.on_gpu is not None:
            self._take_on_gpu(plan.on_gpu, given, matrices, out)
        else:
            for run in plan.runs:
                for part in run.parts(self._at_once):
                    self._take_run(frame.branch(), part, given, matrices, out)
        are_taken = self._is_scanned and plan.on_gpu is not None
        for span in () if are_taken else plan.slices:
            for tokens, num_before in span.chunks(self._chunk):
                own, row = frame.branch(), matrices[span.row]
                with self._in_float32(own, row, num_before) as matrix_HKV:
                    self._take_chunk(own, given.of_tokens(tokens), matrix_HKV, out[tokens])

    @staticmethod
    @abstractmethod
    def _compiled(kernels: Kernels) -> Kernel:
        """What takes all tokens on a CPU."""

    @abstractmethod
    def _work(
        self, frame: Frame, spans: StateSpans, given: Given, matrices: Tensor, out: Tensor
    ) -> Work:
        """What that is given."""

    @abstractmethod
    def _take_on_gpu(self, spans: StateSpans, given: Given, matrices: Tensor, out: Tensor) -> None:
        """Those that a kernel on a GPU takes."""

    @abstractmethod
    def _step(self, frame: Frame, given: Given, matrices_BHKV: Tensor) -> Tensor:
        """One token of each sequence, by torch: what is put out. Changes matrices in float32."""

    @abstractmethod
    def _take_chunk(self, frame: Frame, given: Given, matrix_HKV: Tensor, out: Tensor) -> None:
        """A chunk of one sequence, by torch."""

    def _take_run(
        self, frame: Frame, run: StateRun, given: Given, matrices: Tensor, out: Tensor
    ) -> None:
        befores_B = run.befores_B[:, None, None, None]
        with self._in_float32(frame, matrices[run.rows], befores_B) as some_BHKV:
            out[run.tokens_B] = self._step(frame, given.of_tokens(run.tokens_B), some_BHKV)

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
