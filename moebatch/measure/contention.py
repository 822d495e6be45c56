"""Whether other programs took cores away while something was measured, and what to do then."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

HARMLESS_WAITING = 0.05
"""Share of the time; a machine without other work stays below a hundredth."""
_TASKS = Path("/proc/self/task")
T = TypeVar("T")


class Contention:
    """Counts how long the threads of this process were ready to run and had no core.

    One thread that waits holds up all others of a matrix product, so that a tenth of the time can
    cost half of the speed.
    """

    def __init__(self, num_threads: int, tasks: Path = _TASKS) -> None:
        self._num_threads = num_threads
        self._tasks = tasks
        self._start_s = time.perf_counter()
        self._waited_before_s = self._waited_s()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s

    @property
    def share(self) -> float:
        """Share of the time since the start, from 0 to 1, for which a computing thread had to
        wait; 0 where the kernel does not tell."""
        waited_s = self._waited_s() - self._waited_before_s
        return min(max(waited_s / (self.elapsed_s * self._num_threads), 0.0), 1.0)

    def _waited_s(self) -> float:
        """Nanoseconds on the run queue are the second number of a thread's ``schedstat``."""
        total_ns = 0
        for path in self._tasks.glob("*/schedstat"):
            try:
                total_ns += int(path.read_text().split()[1])
            except (OSError, IndexError, ValueError):
                continue  # a thread that has ended
        return total_ns * 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt(Generic[T]):
    """What a step found, and how much it was disturbed."""

    result: T
    share: float
    elapsed_s: float


class Patience:
    """Measures steps again that others disturbed, in the hope that they have ended by then."""

    def __init__(self, num_threads: int, patience_s: float, tasks: Path = _TASKS) -> None:
        """`patience_s` bounds what repeats of all steps may take, the last one aside."""
        self._num_threads = num_threads
        self._left_s = patience_s
        self._tasks = tasks
        self._waited_s = 0.0
        self._elapsed_s = 0.0

    def calmest(self, step: Callable[[], T]) -> T:
        """What `step` finds when it is disturbed least."""
        kept = self._attempt(step)
        while kept.share > HARMLESS_WAITING and self._left_s > 0:
            again = self._attempt(step)
            self._left_s -= again.elapsed_s
            kept = min(kept, again, key=lambda attempt: attempt.share)
        self._waited_s += kept.share * kept.elapsed_s
        self._elapsed_s += kept.elapsed_s
        return kept.result

    @property
    def share(self) -> float:
        """Share of the time of what was kept for which computing threads had to wait."""
        return self._waited_s / self._elapsed_s if self._elapsed_s else 0.0

    def _attempt(self, step: Callable[[], T]) -> _Attempt[T]:
        contention = Contention(self._num_threads, self._tasks)
        result = step()
        return _Attempt(result=result, share=contention.share, elapsed_s=contention.elapsed_s)
