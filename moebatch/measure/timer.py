"""How long something takes: repeated after a first call, within bounds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

_SWEPT_BYTES = 2**27
"""More than caches hold that are worth it."""
Allocate = Callable[[int], Tensor]
"""Gives so many bytes (uint8) of a device's memory, as a job has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer:
    """Times calls on one device."""

    device: torch.device
    budget_s: float
    """Repeats begin until so much time has gone by."""
    least_repeats: int = 3
    beside_reading: bool = False
    """Whether experts are read meanwhile, as in a job: what that costs belongs to the figure."""

    def seconds(
        self, call: Callable[[], object], *, prepare: Callable[[], object] = lambda: None
    ) -> float:
        """Seconds of `call`, its first run left out, in which libraries prepare themselves.

        `prepare` runs before every call and is not timed.
        """
        return self.seconds_of_each(call, prepare=prepare)[0]

    def seconds_of_each(
        self, *calls: Callable[[], object], prepare: Callable[[], object] = lambda: None
    ) -> tuple[float, ...]:
        """The same for several calls that take turns, so that what disturbs one disturbs all and
        their differences mean something.

        Of the repeats the lower quartile counts, since other programs only ever add time; beside
        reading the mean does, since what reading adds a job has to pay as well.
        """

        def once() -> list[float]:
            prepare()
            return [self._once(call) for call in calls]

        return self._of_repeats(once)

    def seconds_told(self, call: Callable[[], float]) -> float:
        """The same of what `call` says itself that it took."""
        return self._of_repeats(lambda: [call()])[0]

    def _of_repeats(self, once: Callable[[], list[float]]) -> tuple[float, ...]:
        first_s = once()
        least = self.least_repeats if sum(first_s) < self.budget_s else 1
        rounds: list[list[float]] = []
        start = time.perf_counter()
        while len(rounds) < least or time.perf_counter() - start < self.budget_s:
            rounds.append(once())
        return tuple(map(self._typical, zip(*rounds, strict=True)))

    def _typical(self, seconds: Sequence[float]) -> float:
        return fmean(seconds) if self.beside_reading else sorted(seconds)[len(seconds) // 4]

    def _once(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(time.perf_counter() - start, 1e-9)


class CacheSweep:
    """Goes through memory, as through weights, and leaves nothing of anything else in caches."""

    def __init__(self, memory: Tensor) -> None:
        # As integers of the type of their sum, for which torch copies nothing.
        num_bytes = min(_SWEPT_BYTES, memory.nbytes) // torch.int64.itemsize * torch.int64.itemsize
        self._swept = memory.view(torch.uint8)[:num_bytes].view(torch.int64)

    def __call__(self) -> None:
        self._swept.sum()
