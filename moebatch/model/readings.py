"""Texts that a model is held against: tokens that are given, and tokens that it should expect.

Shape letters: B sequences, S positions.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Reading(NamedTuple):
    """A sequence of tokens."""

    tokens: tuple[int, ...]
    num_given: int = 1
    """So many of its first tokens are not expected of the model: those of a prompt."""


@dataclass(frozen=True, slots=True)
class ReadingBatch:
    """Sequences of one length, so that nothing is padded."""

    tokens_BS: Tensor
    num_given_B: Tensor

    @property
    def is_expected_BS(self) -> Tensor:
        """Which tokens count; never the first ones, which nothing comes before."""
        positions_S = torch.arange(self.tokens_BS.shape[1])
        return positions_S >= self.num_given_B.clamp_min(1)[:, None]

    @property
    def num_expected(self) -> int:
        """Tokens that count."""
        return int(self.is_expected_BS.sum())


def reading_batches(readings: Sequence[Reading], *, most_tokens: int) -> Iterator[ReadingBatch]:
    """All of them, the longest first, in batches of no more tokens than `most_tokens`, or of one
    sequence."""
    by_length: dict[int, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_length[len(reading.tokens)].append(reading)
    for length, alike in sorted(by_length.items(), reverse=True):
        step = max(1, most_tokens // length)
        for start in range(0, len(alike), step):
            part = alike[start : start + step]
            yield ReadingBatch(
                torch.tensor([reading.tokens for reading in part]),
                torch.tensor([reading.num_given for reading in part]),
            )
