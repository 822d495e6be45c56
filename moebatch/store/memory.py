"""Host memory that the program owns: page-aligned arenas, and what the process really holds."""

import ctypes
import errno
import functools
import mmap
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES, align_up

_TOUCHED_BYTES = 2**26
"""At once: a signal is handled between two calls, and the system may take a minute to find all
memory of a large arena."""


class Arena:
    """Page-aligned private memory, backed by huge pages where the kernel has them.

    All of it is touched at once, so that what the process holds does not grow later. Huge pages
    make O_DIRECT a quarter faster: fewer pages to pin for every read.

    Pinned memory is what a CUDA device copies to and from beside other work; it stays pinned until
    `unpin`. Where the system refuses that, as virtual machines and WSL2 do beyond some size, the
    memory is there all the same: copies of it go through buffers of the driver, at half the speed.
    """

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        self.num_bytes = align_up(max(num_bytes, 1))
        self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        for piece in torch.split(self.bytes, _TOUCHED_BYTES):
            piece.zero_()
        self.is_pinned = pinned and _pins(self.bytes)

    def unpin(self) -> None:
        """Gives pinned memory back to the system's care; nothing if it was not pinned."""
        if self.is_pinned:
            _cuda_runtime().cudaHostUnregister(self.bytes.data_ptr())
            self.is_pinned = False

    def give_back(self, start: int, stop: int) -> int:
        """Gives the system whole pages between two places back; returns how many bytes.

        They must not be written any more: that would take them again. Where huge pages are cut,
        the system frees the rest of them when it needs memory.
        """
        assert not self.is_pinned, "pinned memory stays where it is"
        first, last = align_up(start), stop // PAGE_BYTES * PAGE_BYTES
        if first >= last:
            return 0
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        return last - first

    def view(self, start: int, num_bytes: int) -> memoryview:
        """A writable window for system calls."""
        return memoryview(self._memory)[start : start + num_bytes]

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the bytes from `start`, sharing memory."""
        flat = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=start)
        return flat.view(shape)


_REFUSALS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "out of memory (2)",  # of calls of the runtime that torch checks
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
)
"""What torch says when memory is refused to it, or to a library that it calls."""


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copies uint8 [num_bytes] into another tensor of that size.

    Within main memory by the calling thread alone: torch would take all processors for it, and run
    at a third of the speed while they compute. With a GPU the copy is only issued, on the current
    stream.
    """
    if target.device.type == "cpu" == source.device.type:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)


class _Bytes:
    """Memory at an address, as torch asks for what a GPU can reach."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def seen_from(device: torch.device, tensor: Tensor) -> Tensor | None:
    """Contiguous numbers in pinned memory as a tensor of a GPU, whose kernels then read and write
    them over the link; None where they are out of its reach."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return None
    with suppress(RuntimeError, TypeError, ValueError):  # memory that is not pinned
        seen = torch.as_tensor(_Bytes(tensor), device=device)
        if seen.data_ptr() == tensor.data_ptr():
            return seen.view(tensor.dtype).view(tensor.shape)
    return None


def return_freed_memory() -> None:
    """Gives what the allocator holds back to the system, where it is glibc's: 3 ms, and what a
    process holds does not creep up over a night of changing shapes."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Looked up once: each look leaves a library of ctypes, which refers to itself."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the system, or a device, has refused memory. torch has no type of its own for it on
    the CPU, nor for what its libraries ask a GPU for."""
    refused = isinstance(error, MemoryError | torch.OutOfMemoryError)
    refused |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    text = str(error)
    return refused or (isinstance(error, RuntimeError) and any(part in text for part in _REFUSALS))


def resident_bytes() -> int:
    """Physical memory that this process holds now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Most physical memory that this process has held, by the kernel's own count."""
    return _status_bytes("VmHWM")


def _pins(memory: Tensor) -> bool:
    """Pins uint8 [num_bytes] where the system allows it."""
    if int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), len(memory), 0)) == 0:
        return True
    with suppress(RuntimeError):  # the next kernel is told of the refusal, whose it may be
        torch.ones(1, device="cuda").add_(1)
    return False


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel reports no {field}")
