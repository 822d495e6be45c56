"""Which sequences recurrent layers meet in a micro-batch: the same for all layers.

Shape letters: B sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.model.native import loader
from moebatch.model.native.delta_rule import DeltaSpans
from moebatch.spec.model.recurrence import CHUNK_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpan:
    """New tokens of a sequence in rows of a micro-batch, and its row of the state."""

    start: int
    num_tokens: int
    row: int
    begins: bool
    """It has no tokens before them."""

    @property
    def chunks(self) -> Iterator[slice]:
        """Its rows of the micro-batch, some at a time."""
        stop = self.start + self.num_tokens
        for first in range(self.start, stop, CHUNK_TOKENS):
            yield slice(first, min(first + CHUNK_TOKENS, stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaPlan:
    """Which sequences have tokens in a micro-batch, where, and which row of the state is theirs."""

    num_tokens: int
    begun_B: Tensor
    """Rows of the state of sequences that begin here, on its device."""
    compiled: DeltaSpans | None
    """All of them, where compiled kernels take them: token by token, since a matrix stays in the
    nearest cache meanwhile. None where torch does."""
    runs: tuple[tuple[slice, Tensor], ...] = ()
    """For torch, sequences that have one token: rows that follow each other, and their tokens."""
    slices: tuple[StateSpan, ...] = ()
    """For torch, all others."""

    @classmethod
    def of(
        cls, spans: Sequence[StateSpan], dtype: torch.dtype, device: torch.device
    ) -> "DeltaPlan":
        """For spans that follow each other without gaps, of a state on `device`."""
        assert len({span.row for span in spans}) == len(spans), "tokens of a sequence are together"
        kernels = loader.kernels() if device.type == "cpu" else None
        num_tokens = sum(span.num_tokens for span in spans)
        begun = [span.row for span in spans if span.begins]
        begun_B = torch.tensor(begun, dtype=torch.int64, device=device)
        if kernels is not None and kernels.attends(dtype):
            by_length = sorted(spans, key=lambda span: -span.num_tokens)
            compiled = _as_tensors(by_length)
            return cls(num_tokens=num_tokens, begun_B=begun_B, compiled=compiled)
        singles = sorted((s for s in spans if s.num_tokens == 1), key=lambda span: span.row)
        return cls(
            num_tokens=num_tokens,
            begun_B=begun_B,
            compiled=None,
            runs=tuple(_runs(singles, device)),
            slices=tuple(span for span in spans if span.num_tokens > 1),
        )


def _as_tensors(spans: Sequence[StateSpan]) -> DeltaSpans:
    columns = [(span.row, span.start, span.num_tokens) for span in spans]
    return DeltaSpans(*torch.tensor(columns).t().contiguous())


def _runs(singles: Sequence[StateSpan], device: torch.device) -> Iterator[tuple[slice, Tensor]]:
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


def _run(spans: Sequence[StateSpan], device: torch.device) -> tuple[slice, Tensor]:
    tokens_B = torch.tensor([span.start for span in spans], device=device)
    return slice(spans[0].row, spans[-1].row + 1), tokens_B
