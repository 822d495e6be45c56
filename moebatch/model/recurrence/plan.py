"""Which sequences recurrent layers meet in a micro-batch: the same for all layers.

Shape letters: B sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.layout.fused import steps_at_once
from moebatch.model.gpu import loader as gpu
from moebatch.model.native import loader
from moebatch.model.native.delta_rule import StateSpans
from moebatch.spec.model.recurrence import CHUNK_TOKENS, Recurrence


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpan:
    """New tokens of a sequence in rows of a micro-batch, and its row of the state."""

    start: int
    num_tokens: int
    row: int
    num_before: int
    """Tokens that it had before them."""

    def chunks(self, most: int) -> Iterator[tuple[slice, int]]:
        """Its rows of the micro-batch, at most so many at a time, and how many tokens come before
        the last of these."""
        stop = self.start + self.num_tokens
        for first in range(self.start, stop, most):
            end = min(first + most, stop)
            yield slice(first, end), self.num_before + end - self.start - 1


class StateRun(NamedTuple):
    """Sequences with one token each, whose states follow each other."""

    rows: slice
    """Of the state."""
    tokens_B: Tensor
    """Rows of the micro-batch."""
    befores_B: Tensor
    """Tokens that each had before."""

    def parts(self, most: int) -> Iterator["StateRun"]:
        """At most so many sequences at a time."""
        for start in range(self.rows.start, self.rows.stop, most):
            rows = slice(start, min(start + most, self.rows.stop))
            part = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
            yield StateRun(rows, self.tokens_B[part], self.befores_B[part])


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentPlan:
    """Which sequences have tokens in a micro-batch, where, and which row of the state is theirs."""

    begun_B: Tensor
    """Rows of the state of sequences that begin here, on its device."""
    compiled: StateSpans | None = None
    """All of them, where compiled kernels take them: token by token, since a matrix stays in the
    nearest cache meanwhile. None where torch does."""
    on_gpu: StateSpans | None = None
    """Sequences that a kernel on a GPU takes: those that have one token, or all of them where
    prompts are scanned."""
    runs: tuple[StateRun, ...] = ()
    """Those that have one token, for torch."""
    slices: tuple[StateSpan, ...] = ()
    """For torch, all others."""

    @classmethod
    def of(
        cls,
        spans: Sequence[StateSpan],
        recurrence: Recurrence,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "RecurrentPlan":
        """For spans that follow each other without gaps, of a state on `device`, where everything
        else is computed in `dtype`."""
        assert len({span.row for span in spans}) == len(spans), "tokens of a sequence are together"
        kernels = loader.kernels() if device.type == "cpu" else None
        begun = [span.row for span in spans if not span.num_before]
        begun_B = torch.tensor(begun, dtype=torch.int64, device=device)
        kept_in = getattr(torch, recurrence.state_dtype or "float32")
        if kernels is not None and kernels.attends(dtype) and kernels.attends(kept_in):
            by_length = sorted(spans, key=lambda span: -span.num_tokens)
            return cls(begun_B=begun_B, compiled=_as_tensors(by_length, device))
        singles = sorted((s for s in spans if s.num_tokens == 1), key=lambda span: span.row)
        taken = spans if recurrence.is_scanned else singles
        takes_steps = steps_at_once(recurrence) and gpu.are_for(device)
        return cls(
            begun_B=begun_B,
            on_gpu=_as_tensors(taken, device) if takes_steps else None,
            runs=tuple(_runs(singles, device)),
            slices=tuple(span for span in spans if span.num_tokens > 1),
        )


def _as_tensors(spans: Sequence[StateSpan], device: torch.device) -> StateSpans:
    columns = [(span.row, span.start, span.num_tokens, span.num_before) for span in spans]
    table = torch.tensor(columns, dtype=torch.int64).view(-1, len(StateSpans._fields))
    return StateSpans(*table.t().contiguous().to(device))


def _runs(singles: Sequence[StateSpan], device: torch.device) -> Iterator[StateRun]:
    """Of spans in the order of their rows; none so long that what is computed on the way takes more
    room than a chunk does."""
    run: list[StateSpan] = []
    for span in singles:
        if run and (span.row > run[-1].row + 1 or len(run) == CHUNK_TOKENS):
            yield _run(run, device)
            run = []
        run.append(span)
    if run:
        yield _run(run, device)


def _run(spans: Sequence[StateSpan], device: torch.device) -> StateRun:
    columns = torch.tensor([(span.start, span.num_before) for span in spans], device=device)
    return StateRun(slice(spans[0].row, spans[-1].row + 1), *columns.t())
