"""Rows of sequences that see similarly many, side by side.

Shape letters: B sequences, S positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.layout.scratch import bucket_positions

_MAX_PADDING = 0.25


class Seen(NamedTuple):
    """A token, and what it sees."""

    token: int
    """Its row in the micro-batch."""
    rows_S: Ints
    """Cache rows, in order of position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Tokens that see similarly many rows, padded to a common number of them."""

    tokens_B: Tensor
    """Row of each token in the micro-batch."""
    rows_BS: Tensor
    """Cache rows that each of them sees; padding repeats the last one, since rows that no token has
    written may hold NaN, which no mask hides."""
    back_BS: Tensor
    """How far each is behind the last; -1 where it is padding."""

    @classmethod
    def all_of(cls, seen: Sequence[Seen], most_rows: int) -> "Iterator[Gathered]":
        """In groups of descending length, with little padding and at most so many rows each, unless
        one token sees more; on the CPU, since these are many small steps for a GPU."""
        group: list[Seen] = []
        for one in sorted(seen, key=lambda one: -len(one.rows_S)):
            if group:
                longest = len(group[0].rows_S)
                fits = (len(group) + 1) * bucket_positions(longest) <= most_rows
                if not fits or len(one.rows_S) < longest * (1 - _MAX_PADDING):
                    yield cls._of(group)
                    group = []
            group.append(one)
        if group:
            yield cls._of(group)

    @classmethod
    def _of(cls, seen: Sequence[Seen]) -> "Gathered":
        tokens, rows = zip(*seen, strict=True)
        counts = list(map(len, rows))
        counts_B1 = torch.tensor(counts)[:, None]
        positions_S = torch.arange(bucket_positions(max(counts)))
        back_BS = (counts_B1 - 1 - positions_S).clamp_(min=-1)
        newest_B1 = torch.tensor([int(rows_S[-1]) for rows_S in rows])[:, None]
        rows_BS = newest_B1.repeat(1, len(positions_S))
        rows_BS[back_BS >= 0] = torch.from_numpy(np.concatenate(rows))
        return cls(tokens_B=torch.tensor(tokens), rows_BS=rows_BS, back_BS=back_BS)

    def mask_B11S(self, dtype: torch.dtype) -> Tensor:
        """0 where a row counts, -inf where it is padding."""
        is_padding_BS = self.back_BS < 0
        zeros_BS = torch.zeros_like(is_padding_BS, dtype=dtype)
        return zeros_BS.masked_fill_(is_padding_BS, -torch.inf)[:, None, None]

    def to(self, device: torch.device) -> "Gathered":
        return Gathered(
            tokens_B=self.tokens_B.to(device),
            rows_BS=self.rows_BS.to(device),
            back_BS=self.back_BS.to(device),
        )
