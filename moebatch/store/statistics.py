"""What a lane that reads files did, counted while it does it."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class BusyClock:
    """Adds up the time in which at least one thing is going on."""

    _num_active: int = 0
    _since: float = 0.0
    _total_s: float = 0.0

    def enter(self) -> None:
        """One more thing begins."""
        if self._num_active == 0:
            self._since = time.perf_counter()
        self._num_active += 1

    def leave(self) -> None:
        """One thing ends."""
        self._num_active -= 1
        if self._num_active == 0:
            self._total_s += time.perf_counter() - self._since

    @property
    def total_s(self) -> float:
        """Seconds so far, those of what is going on now included."""
        running = time.perf_counter() - self._since if self._num_active else 0.0
        return self._total_s + running


@dataclass(slots=True)
class ReadStatistics:
    """What has been read so far."""

    is_direct: bool = True
    """Whether the page cache is bypassed."""
    num_bytes: int = 0
    busy: BusyClock = field(default_factory=BusyClock)
    """Time in which at least one read was in flight."""
    waited_s: float = 0.0
    """Time in which compute waited for an expert."""
