"""Threads that compute a kernel's work together."""

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from moebatch.model.native.kernels import Kernel, Work

Parallel = Callable[[int, int, int, int], None]
"""Calls the function at an address with another address, on so many threads; then flags."""


class Helpers:
    """Has work done by several threads, the calling one among them. One caller at a time.

    Those of torch if that can be: after a matrix product they spin for milliseconds, and threads of
    our own would have to share their cores (measured: 9 instead of 6 ms for 512 sequences).
    """

    def __init__(self, parallel: Parallel | None = None) -> None:
        """Without `parallel`, it keeps threads of its own from one call to the next."""
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._num_others = 0

    def run(self, kernel: Kernel, work: Work, num_threads: int) -> None:
        """Has all of `work` done by so many threads."""
        if num_threads == 1:
            kernel(work)
        elif self._parallel is not None:
            self._parallel(kernel.address, ctypes.addressof(work), num_threads, 0)
        else:
            self._share(kernel, work, num_threads - 1)

    def _share(self, kernel: Kernel, work: Work, num_others: int) -> None:
        pool = self._pool_of(num_others)
        others = [pool.submit(kernel, work) for _ in range(num_others)]
        try:
            kernel(work)
        finally:
            # Who has not begun yet would find nothing left to do.
            for other in others:
                if not other.cancel():
                    other.result()

    def _pool_of(self, num_threads: int) -> ThreadPoolExecutor:
        if self._pool is None or num_threads != self._num_others:
            if self._pool is not None:
                self._pool.shutdown()
            self._pool = ThreadPoolExecutor(num_threads, "kernel")
            self._num_others = num_threads
        return self._pool


def threads_for(size: int, least_shared: int) -> int:
    """Threads for a work of that size: one alone has done what is smaller than `least_shared`
    before another one would be awake."""
    return torch.get_num_threads() if size >= least_shared else 1


@functools.cache
def torch_parallel() -> Parallel | None:
    """How GCC starts a parallel region, from the OpenMP library that torch has loaded; None where
    torch has another one."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Found among the libraries that this one needs.
        function = ctypes.CDLL(str(path)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None

    def parallel(address: int, argument: int, num_threads: int, flags: int) -> None:
        function(address, argument, num_threads, flags)

    return parallel
