"""Memory of a device, real or emulated, with a capacity that nothing exceeds."""

import threading
from collections import Counter
from math import prod

import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES, align_up
from moebatch.errors import DoesNotFit
from moebatch.spec.machine.hardware import LevelName
from moebatch.store.memory import Arena
from moebatch.units import format_bytes

_ALIGNMENT_BYTES = 512


class DeviceMemory:
    """Hands out tensors on a device until its capacity is used up.

    On a GPU the capacity is a budget within the real one. An emulated device is a share of main
    memory: `torch.device("cpu")` with the capacity of the GPU that it stands for. May be used by
    several threads.
    """

    def __init__(
        self, device: torch.device, capacity_bytes: int, *, level: LevelName = "vram"
    ) -> None:
        self.device = device
        self.level = level
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.taken_bytes: Counter[str] = Counter()
        """Bytes that have been taken under each name."""
        self._lock = threading.Lock()

    def allocate(
        self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.uint8, *, what: str = "data"
    ) -> Tensor:
        """Zeros of that shape; from a page of bytes on, they begin at a page on an emulated device.

        `what` names them if they do not fit: then DoesNotFit is raised.
        """
        shape = (shape,) if isinstance(shape, int) else shape
        num_bytes = prod(shape) * dtype.itemsize
        self.reserve(num_bytes, what)
        if self.device.type == "cpu" and num_bytes >= PAGE_BYTES:
            return Arena(num_bytes).tensor(0, shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def reserve(self, num_bytes: int, what: str) -> None:
        """Counts what is allocated elsewhere on the device. Raises DoesNotFit."""
        num_bytes = align_up(num_bytes, _ALIGNMENT_BYTES)
        with self._lock:
            left = self.capacity_bytes - self.used_bytes
            if num_bytes > left:
                raise DoesNotFit(
                    f"{self.level}: {what} take {format_bytes(num_bytes)}, but only "
                    f"{format_bytes(left)} of {format_bytes(self.capacity_bytes)} are left; "
                    f"raise resources.{self.level}, or have the policy planned again"
                )
            self.used_bytes += num_bytes
            self.taken_bytes[what] += num_bytes
