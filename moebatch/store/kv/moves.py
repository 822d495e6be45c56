"""Copying scattered pages, or rows, of keys and values from one memory to another."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.store.memory import seen_from
from moebatch.store.scratch_file import PageRuns

_UNITS_OF_SPAN = 4
"""From this mean length on, gathering span by span is cheaper than gathering and scattering."""
_LEAST_RUN_BYTES = 2**18
"""Of a run in the mean: a link of 25 GB/s takes 10 us for it, as long as the host for a copy."""
_WORD = torch.int64
"""What a thread of a GPU reads at once, so that it asks the link for few large pieces."""


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
    _placed: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _file_runs: dict[bool, PageRuns] = field(default_factory=dict)

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
        is until the stream has come so far, and host memory should be pinned. One kernel of a GPU
        then goes through all that lies scattered there; a copy of its own for each run would take
        the host longer than the link.
        """
        if source.device != target.device:
            apart = source, target
            if len(self) * source[:1].nbytes < _LEAST_RUN_BYTES * len(self.runs):
                source, target = _from_one_device(source, target)
            if source.device != target.device:
                self._copy_runs(*apart)
                return
        units, rows = self._on(source.device)
        if len(self.spans) * _UNITS_OF_SPAN <= len(self):
            self._gather(source, target, units)
        else:
            target.index_copy_(0, rows, source.index_select(0, units))

    def file_runs(self, *, from_file: bool) -> PageRuns:
        """As few runs as can be where units are read from a file, or written to one: units of one
        sequence beside those of another, which began or grew with it."""
        if from_file not in self._file_runs:
            in_file, in_memory = (self.source, self.target)[:: 1 if from_file else -1]
            order = in_file.argsort()
            runs = PageRuns.of(in_file[order].numpy(), in_memory[order].numpy())
            self._file_runs[from_file] = runs
        return self._file_runs[from_file]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sources and targets; they go to a device once, for all layers."""
        if device not in self._placed:
            self._placed[device] = self.source.to(device), self.target.to(device)
        return self._placed[device]

    def _copy_runs(self, source: Tensor, target: Tensor) -> None:
        for run in self.runs:
            part = source[run.source : run.source + run.length]
            target[run.target : run.target + run.length].copy_(part, non_blocking=True)

    def _gather(self, source: Tensor, target: Tensor, units: Tensor) -> None:
        for first, start, length in self.spans:
            part = target[start : start + length]
            torch.index_select(source, 0, units[first : first + length], out=part)


def _from_one_device(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as the GPU sees them that one of them is on, in words of 8 bytes if they are such; as
    they are where the other one is out of its reach."""
    if source.device.type == "cpu":
        seen, other = seen_from(target.device, source), target
    else:
        seen, other = seen_from(source.device, target), source
    if seen is None:
        return source, target
    if seen[:1].nbytes % _WORD.itemsize == 0:
        seen, other = seen.view(_WORD), other.view(_WORD)
    return (seen, other) if source.device.type == "cpu" else (other, seen)


def _stretches(apart: Tensor, count: int) -> list[tuple[int, int]]:
    """(first, stop) of stretches of `count` units that end where `apart` is true."""
    if count == 0:
        return []
    borders = [0, *(apart.nonzero()[:, 0] + 1).tolist(), count]
    return list(pairwise(borders))
