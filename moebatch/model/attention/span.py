"""New tokens of one sequence.

Shape letters: S positions.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebatch.arrays import Ints


class Span(NamedTuple):
    """New tokens of one sequence: the flat rows [start, start + num_tokens) of the pass.

    A pass has one of each sequence: rows are numpy's, of which a step costs a tenth of torch's.
    """

    start: int
    num_tokens: int
    context: int
    """Tokens of the sequence that are in the KV cache already, and may be seen."""
    rows_S: Ints
    """KV-cache row of each of its positions, new ones included; int64 [context + num_tokens]."""
    rope_length: int
    """Prompt length: the least length that length-dependent rotary scalings count with."""
    num_skipped: int = 0
    """Tokens behind the sinks that none of them sees: they are left out of `context` and rows."""
    state_row: int = 0
    """Row of what recurrent layers keep of the sequence."""
    num_encoded: int = 0
    """Tokens at the beginning of the sequence that an encoder takes in."""

    @property
    def num_before(self) -> int:
        """Tokens of the sequence before them."""
        return self.num_skipped + self.context

    def tokens_from(self, first: int) -> slice:
        """Their rows in the micro-batch that begins at `first`."""
        return slice(self.start - first, self.start - first + self.num_tokens)

    def in_chunks(self, size: int) -> Iterator["Span"]:
        """The same tokens, those of each chunk of their sequence by themselves, as if nothing were
        before it."""
        done = 0
        while done < self.num_tokens:
            begin = (self.num_before + done) // size * size
            context = self.num_before + done - begin
            num_tokens = min(size - context, self.num_tokens - done)
            first = begin - self.num_skipped
            yield self._replace(
                start=self.start + done,
                num_tokens=num_tokens,
                context=context,
                rows_S=self.rows_S[first : first + context + num_tokens],
                num_skipped=begin,
            )
            done += num_tokens

    def split(self, num_tokens: int) -> tuple["Span | None", "Span | None"]:
        """The first tokens, so many at the most, and those behind them; None instead of none."""
        first = min(max(0, num_tokens), self.num_tokens)
        end = self.context + first
        before = self._replace(num_tokens=first, rows_S=self.rows_S[:end])
        behind = self._replace(
            start=self.start + first, num_tokens=self.num_tokens - first, context=end
        )
        return before if first else None, behind if behind.num_tokens else None

    def pieces(self, most_tokens: int) -> Iterator["Span"]:
        """The same tokens as spans of at most that many, to be attended in this order."""
        for done in range(0, self.num_tokens, most_tokens):
            num_tokens = min(most_tokens, self.num_tokens - done)
            context = self.context + done
            yield self._replace(
                start=self.start + done,
                num_tokens=num_tokens,
                context=context,
                rows_S=self.rows_S[: context + num_tokens],
            )


def new_rows(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Cache row of each of their tokens, [T]."""
    return placed([span.rows_S[span.context :] for span in spans], device)


def placed(rows: Sequence[Ints], device: torch.device) -> Tensor:
    """Rows one after the other, on a device."""
    return torch.from_numpy(np.concatenate(rows)).to(device)
