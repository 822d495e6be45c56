"""Texts that a model is held against: tokens that are given, and tokens that it should expect.

Shape letters: B sequences, S positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BATCH_TOKENS = 1024
"""Tokens that go through a model at a time: what lies between its layers has to be kept."""
_PADDING = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A sequence of tokens."""

    tokens: tuple[int, ...]
    num_given: int = 1
    """So many of its first tokens, at least one, are not expected of the model: those of a
    prompt."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_expected(self) -> int:
        """Tokens that count."""
        return max(0, len(self.tokens) - self.num_given)


@dataclass(frozen=True, slots=True)
class ReadingBatch:
    """Sequences that go through a model together, each as wide as the longest. What stands behind
    the end of a sequence is seen by no token before it."""

    tokens_BS: Tensor
    is_text_BS: Tensor
    """Which tokens are of a sequence; the others stand behind its end."""
    is_expected_BS: Tensor
    """Which tokens count; never the first ones, which nothing comes before."""

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> "ReadingBatch":
        """Readings in their order."""
        size = len(readings), max(map(len, readings))
        tokens_BS = torch.full(size, _PADDING)
        for row, reading in enumerate(readings):
            tokens_BS[row, : len(reading)] = torch.tensor(reading.tokens)
        positions_S = torch.arange(size[1])
        lengths_B = torch.tensor([len(reading) for reading in readings])
        num_given_B = torch.tensor([reading.num_given for reading in readings])
        is_text_BS = positions_S < lengths_B[:, None]
        return cls(tokens_BS, is_text_BS, is_text_BS & (positions_S >= num_given_B[:, None]))


def reading_batches(readings: Sequence[Reading]) -> Iterator[ReadingBatch]:
    """All of them, the longest first, in batches of no more than `BATCH_TOKENS` tokens with what
    they are filled up with, or of one sequence."""
    group: list[Reading] = []
    for reading in sorted(readings, key=len, reverse=True):
        if group and len(group[0]) * (len(group) + 1) > BATCH_TOKENS:
            yield ReadingBatch.of(group)
            group = []
        group.append(reading)
    if group:
        yield ReadingBatch.of(group)


def num_expected(readings: Sequence[Reading]) -> int:
    """Tokens of all of them that count; at least one, so that there is a mean."""
    return max(1, sum(reading.num_expected for reading in readings))
