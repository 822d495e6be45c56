"""Pinned buffers through which bytes go on their way to a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moebatch.store.copy_bytes import copy_bytes
from moebatch.store.memory import Arena


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """One of the ring: filled, copied from, and filled again when that has ended."""

    room: Tensor
    copied: torch.cuda.Event | None
    """The end of the last copy out of it; None where copies end when they return."""

    def send(self, target: Tensor) -> None:
        """Copies the first bytes of it to a device, on the current stream."""
        copy_bytes(target, self.room[: len(target)])
        if self.copied is not None:
            self.copied.record()


class StagingRing:
    """Buffers that are used in turn, by one thread."""

    def __init__(self, num_buffers: int, num_bytes: int, device: torch.device) -> None:
        """Buffers for copies to `device`; pinned if it is a GPU."""
        is_cuda = device.type == "cuda"
        self.num_bytes = num_bytes
        self._arena = Arena(num_buffers * num_bytes, pinned=is_cuda)
        self._buffers = [
            StagingBuffer(
                self._arena.bytes[i * num_bytes : (i + 1) * num_bytes],
                torch.cuda.Event() if is_cuda else None,  # type: ignore[no-untyped-call]
            )
            for i in range(num_buffers)
        ]
        self._next = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self) -> StagingBuffer:
        """The buffer that was used longest ago; waits until it has been copied from."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def close(self) -> None:
        """Unpins the buffers. Nothing may be on its way out of them."""
        self._arena.unpin()
