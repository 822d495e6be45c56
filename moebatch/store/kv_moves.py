"""Copying scattered pages, or rows, of keys and values from one memory to another."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_UNITS_OF_SPAN = 4
"""From this mean length on, gathering span by span is cheaper than gathering and scattering."""


class Run(NamedTuple):
    """Units that follow each other in the source as in the target."""

    source: int
    target: int
    length: int


class Span(NamedTuple):
    """Units that follow each other in the target: from `first` of the moves on."""

    first: int
    target: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moves:
    """Which unit (a page, or a row of one token) goes where, worked out once for all layers."""

    source: Tensor
    target: Tensor
    runs: tuple[Run, ...]
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, source: list[int] | Tensor, target: list[int] | Tensor) -> "Moves":
        """Unit ``source[i]`` goes to ``target[i]``."""
        sources = torch.as_tensor(source, dtype=torch.int64)
        targets = torch.as_tensor(target, dtype=torch.int64)
        assert len(sources) == len(targets), "every unit needs a place to go"
        apart = targets.diff() != 1
        from_units, to_units = sources.tolist(), targets.tolist()
        runs = [
            Run(from_units[first], to_units[first], stop - first)
            for first, stop in _stretches(apart | (sources.diff() != 1), len(sources))
        ]
        spans = [
            Span(first, to_units[first], stop - first)
            for first, stop in _stretches(apart, len(targets))
        ]
        return cls(source=sources, target=targets, runs=tuple(runs), spans=tuple(spans))

    def __len__(self) -> int:
        return len(self.source)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies units of `source` into `target`, both [units, numbers of a unit].

        Between devices the copies are only issued, on the current stream: `source` must stay as it
        is until the stream has come so far, and host memory should be pinned.
        """
        if source.device != target.device:
            for run in self.runs:
                part = source[run.source : run.source + run.length]
                target[run.target : run.target + run.length].copy_(part, non_blocking=True)
        elif len(self.spans) * _UNITS_OF_SPAN <= len(self):
            self._gather(source, target)
        else:
            rows, units = self.target.to(target.device), self.source.to(source.device)
            target.index_copy_(0, rows, source.index_select(0, units))

    def _gather(self, source: Tensor, target: Tensor) -> None:
        units = self.source.to(source.device)
        for first, start, length in self.spans:
            part = target[start : start + length]
            torch.index_select(source, 0, units[first : first + length], out=part)


def _stretches(apart: Tensor, count: int) -> list[tuple[int, int]]:
    """(first, stop) of stretches of `count` units that end where `apart` is true."""
    if count == 0:
        return []
    borders = [0, *(apart.nonzero()[:, 0] + 1).tolist(), count]
    return list(pairwise(borders))
