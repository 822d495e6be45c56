"""Threads that compute a kernel's work together."""

from concurrent.futures import ThreadPoolExecutor

from moebatch.model.native.kernel import Kernel, Work


class Helpers:
    """Threads beside the calling one, kept from one call to the next. One caller at a time."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0

    def attend(self, kernel: Kernel, work: Work, num_threads: int) -> None:
        """Has all of `work` done by so many threads, this one included."""
        pool = self._pool_of(num_threads - 1)
        if pool is None:
            kernel.attend(work)
            return
        others = [pool.submit(kernel.attend, work) for _ in range(num_threads - 1)]
        try:
            kernel.attend(work)
        finally:
            # Who has not begun yet would find nothing left to do.
            for other in others:
                if not other.cancel():
                    other.result()

    def _pool_of(self, num_threads: int) -> ThreadPoolExecutor | None:
        if num_threads != self._num_threads:
            if self._pool is not None:
                self._pool.shutdown()
            self._num_threads = num_threads
            self._pool = ThreadPoolExecutor(num_threads, "attention") if num_threads else None
        return self._pool
