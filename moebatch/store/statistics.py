"""What lanes that move data did, counted while they do it."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Device:
    """What lanes work on side by side: its time is divided evenly among all that is in flight. One
    thread at a time may change it."""

    num_tasks: int = 0
    """Launched tasks among what is in flight; all else are chunks of experts."""
    _num_active: int = 0
    _since: float = 0.0
    _passed_s: float = 0.0

    @property
    def passed_s(self) -> float:
        """Seconds that the device would have given to one thing, had that always been in flight."""
        num_active = self._num_active
        running = (time.perf_counter() - self._since) / num_active if num_active else 0.0
        return self._passed_s + running

    def change(self, by: int, *, is_task: bool) -> None:
        """So many things more, or fewer, are in flight."""
        self._passed_s = self.passed_s
        self._since = time.perf_counter()
        self._num_active += by
        self.num_tasks += by * is_task


@dataclass(slots=True)
class BusyClock:
    """Adds up the time that a lane has of its device while at least one thing of it is in flight:
    all of it, unless other lanes work on the same device."""

    device: Device = field(default_factory=Device)
    _num_active: int = 0
    _since_s: float = 0.0
    _total_s: float = 0.0

    def enter(self, *, is_task: bool = False) -> None:
        """One more thing begins."""
        self._change(1, is_task=is_task)

    def leave(self, *, is_task: bool = False) -> None:
        """One thing ends."""
        self._change(-1, is_task=is_task)

    @property
    def total_s(self) -> float:
        """Seconds so far, those of what is in flight now included."""
        return self._total_s + self._num_active * (self.device.passed_s - self._since_s)

    def _change(self, by: int, *, is_task: bool) -> None:
        self.device.change(by, is_task=is_task)
        now_s = self.device.passed_s
        self._total_s += self._num_active * (now_s - self._since_s)
        self._since_s = now_s
        self._num_active += by


@dataclass(slots=True)
class MoveStatistics:
    """What a lane has moved so far."""

    num_bytes: int = 0
    busy: BusyClock = field(default_factory=BusyClock)
    """Its time on its device."""


@dataclass(slots=True)
class ReadStatistics(MoveStatistics):
    """What has been read so far."""

    is_direct: bool = True
    """Whether the page cache is bypassed."""
    waited_s: float = 0.0
    """Time in which compute waited for an expert."""
