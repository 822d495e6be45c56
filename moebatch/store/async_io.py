"""Many transfers of a file in one call of the system: Linux's asynchronous input and output."""

import ctypes
import errno
import os
import platform
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DEPTH = 64
"""Transfers in flight."""


class _Calls(NamedTuple):
    """Numbers of what has no name in the C library."""

    setup: int
    destroy: int
    submit: int
    get_events: int


_CALLS = {"x86_64": _Calls(206, 207, 209, 208), "aarch64": _Calls(0, 1, 2, 4)}
_BLOCK = np.dtype(
    {
        "names": ["data", "opcode", "file", "buffers", "num_buffers", "offset"],
        "formats": ["u8", "u2", "u4", "u8", "u8", "i8"],
        "offsets": [0, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
"""What the system is told of a transfer (struct iocb)."""
_EVENT = np.dtype([("data", "u8"), ("block", "u8"), ("done", "i8"), ("more", "i8")])
"""What it tells of one that has ended (struct io_event)."""
READ, WRITE = 7, 8
"""From or into buffers that lie apart (IOCB_CMD_PREADV, IOCB_CMD_PWRITEV)."""


class Transfers(NamedTuple):
    """What is read, or written; buffers of one lie behind those of the one before."""

    buffers: NDArray[np.uint64]
    """[buffers, 2]: address and bytes of each; of no transfer more than the system takes in one
    call."""
    num_buffers: NDArray[np.int64]
    """Of each transfer."""
    offsets: NDArray[np.int64]
    """Where each begins in the file."""


class AsyncIO:
    """Hands transfers to the system without a thread for each, and without the interpreter's lock
    while they are in flight: threads that compute beside them are not held up.

    One call at a time is served.
    """

    def __init__(self) -> None:
        """Raises OSError where the system has none, or no more of it."""
        calls = _CALLS.get(platform.machine()) if os.uname().sysname == "Linux" else None
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._calls = calls
        self._lock = threading.Lock()
        self._system = ctypes.CDLL(None, use_errno=True).syscall
        self._system.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._call(calls.setup, DEPTH, ctypes.byref(self._context))

    def run(self, file: int, way: int, transfers: Transfers) -> NDArray[np.int64]:
        """Returns once nothing is in flight any more, with the bytes that each transfer has moved,
        or, below 0, the number of the error.

        Raises OSError when the system takes none of them.
        """
        blocks = _blocks(file, way, transfers)
        places = blocks.ctypes.data + _BLOCK.itemsize * np.arange(len(blocks), dtype=np.uint64)
        done = np.zeros(len(blocks), np.int64)
        events = np.empty(DEPTH, _EVENT)
        with self._lock:
            num_begun = num_ended = 0
            while num_ended < len(blocks):
                num_begun += self._submit(places, num_begun, num_begun - num_ended)
                num_flying = num_begun - num_ended
                # Not woken for each of them as long as others are in flight.
                least = num_flying if num_begun == len(blocks) else (num_flying + 1) // 2
                count = self._call(
                    self._calls.get_events,
                    self._context,
                    ctypes.c_long(least),
                    ctypes.c_long(DEPTH),
                    ctypes.c_void_p(events.ctypes.data),
                    None,
                )
                ended = events[:count]
                done[ended["data"].astype(np.int64)] = ended["done"]
                num_ended += count
        return done

    def close(self) -> None:
        """Gives it back. Nothing may be in flight."""
        self._call(self._calls.destroy, self._context)

    def _submit(self, places: NDArray[np.uint64], first: int, num_flying: int) -> int:
        """How many more the system has taken."""
        count = min(DEPTH - num_flying, len(places) - first)
        if count == 0:
            return 0
        try:
            return self._call(
                self._calls.submit,
                self._context,
                ctypes.c_long(count),
                ctypes.c_void_p(places[first:].ctypes.data),
            )
        except OSError:
            if num_flying == 0:
                raise
            return 0  # what is in flight has to end first

    def _call(self, number: int, *arguments: object) -> int:
        """Raises OSError."""
        while True:
            result: int = self._system(ctypes.c_long(number), *arguments)
            if result >= 0:
                return result
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))


def _blocks(file: int, way: int, transfers: Transfers) -> NDArray[np.void]:
    blocks = np.zeros(len(transfers.offsets), _BLOCK)
    ends = transfers.num_buffers.cumsum()
    firsts = (ends - transfers.num_buffers) * transfers.buffers[:1].nbytes
    blocks["data"] = np.arange(len(blocks))
    blocks["opcode"], blocks["file"] = way, file
    blocks["buffers"] = transfers.buffers.ctypes.data + firsts
    blocks["num_buffers"], blocks["offset"] = transfers.num_buffers, transfers.offsets
    return blocks
