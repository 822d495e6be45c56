"""An emulated GPU: copies take as long as the bytes would take on the real one."""

import time

_CATCH_UP_S = 0.005


class PacedLink:
    """Lets one lane go on no earlier than its bandwidth allows.

    Sleeping is inexact; what one transfer was late, the next may be early, so that a lane that is
    always busy keeps its mean rate.
    """

    def __init__(self, bandwidth: float) -> None:
        """`bandwidth` in bytes per second."""
        self._bandwidth = bandwidth
        self._free_s = 0.0

    def hold(self, num_bytes: int, start_s: float) -> None:
        """Returns when a transfer that began at `start_s` of ``perf_counter`` would have ended."""
        late = 0.0 <= start_s - self._free_s < _CATCH_UP_S
        begin_s = self._free_s if late else start_s
        self._free_s = begin_s + num_bytes / self._bandwidth
        sleep_until(self._free_s)


def sleep_until(moment_s: float) -> None:
    """Returns at a moment of ``perf_counter``, or at once if it is over."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
