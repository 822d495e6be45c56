"""Room for everything that a decoder computes on the way, allocated once."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moebatch.layout.scratch import aligned


class Scratch:
    """One flat buffer from which each step of the decoder takes its temporaries anew.

    Views of an earlier frame are overwritten by the next, so no result may outlive its step, and
    a decoder can be used by one thread only.
    """

    def __init__(self, num_elements: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.buffer = torch.empty(num_elements, device=device, dtype=dtype)

    def frame(self) -> "Frame":
        """A fresh start for the next step."""
        return Frame(self.buffer)


class Frame:
    """Hands out views of the buffer one after the other."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._size = buffer.numel()
        self._used = 0

    def branch(self) -> "Frame":
        """Another frame of the room that is left; it is over before this one takes more."""
        branch = Frame(self._buffer)
        branch._used = self._used
        return branch

    def take(self, *size: int) -> Tensor:
        """An uninitialised tensor of that size."""
        num_elements = math.prod(size)
        start, stop = self._used, self._used + num_elements
        assert stop <= self._size, f"scratch too small for {size}; check the limits"
        self._used = aligned(stop)
        return self._buffer[start:stop].view(size)

    def take_float(self, *size: int) -> Tensor:
        words = torch.float32.itemsize // self._buffer.dtype.itemsize
        return self.take(math.prod(size) * words).view(torch.float32).view(size)


def chunks(most: int, *rows: slice) -> Iterator[slice]:
    """The rows in portions of so many at the most."""
    for part in rows:
        for start in range(part.start, part.stop, most):
            yield slice(start, min(start + most, part.stop))
