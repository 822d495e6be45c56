"""Where a run computes: in main memory, on a GPU, or on one that is only emulated."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from moebatch.layout.ladder import Ladder, stages_pages
from moebatch.schedule.lanes import GPU, STAGING, Lane
from moebatch.schedule.task import Kind, Task
from moebatch.spec.machine.hardware import CONTEXT_BYTES, DeviceKind, Hardware
from moebatch.store.device_memory import DeviceMemory

_CATCH_UP_S = 0.005
_NO_LIMIT_BYTES = 2**62
Hold = Callable[[Task, float], None]
"""Returns when a task that began at a moment of ``perf_counter`` would have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What holds the ``vram`` level, if there is one, and how fast its links are."""

    kind: DeviceKind = "cpu"
    hardware: Hardware | None = None
    """Of an emulated GPU: its capacity, and the rates to which its links are held."""
    least_s: Mapping[Kind, float] = field(default_factory=dict)
    """Seconds that an emulated GPU takes for tasks at least, however fast the CPU computes them."""

    @property
    def ladder(self) -> Ladder:
        """Its levels; files are at the bottom of every one."""
        if self.kind == "cpu":
            return Ladder(("disk", "dram"))
        stages = self.hardware is not None and stages_pages(self.hardware, self.kind)
        return Ladder(("disk", "dram", "vram"), stages=stages, has_gpu=self.is_cuda)

    @property
    def is_cuda(self) -> bool:
        """Whether there is a real one."""
        return self.kind == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of the level that computes are."""
        return torch.device("cuda" if self.is_cuda else "cpu")

    def rate(self, lane: Lane) -> float:
        """Bytes per second of a link as it was measured; 0 of what is none, or was not measured."""
        links = self.hardware.links if self.hardware else {}
        link = next((link for name, link in links.items() if name == lane.at), None)
        if link is None:
            return 0.0
        return (link.staging_bandwidth or 0.0) if lane == STAGING else link.bandwidth

    def hold(self, lane: Lane, num_bytes: Callable[[Task], int]) -> Hold:
        """How long tasks of a lane take at least, where the GPU is emulated."""
        is_paced = self.kind == "emulate" and "vram" in lane.at
        if is_paced and (rate := self.rate(lane)):
            link = _PacedLink(rate)
            return lambda task, start_s: link.hold(num_bytes(task), start_s)
        if lane == GPU:
            least_s = self.least_s
            return lambda task, start_s: _sleep_until(start_s + least_s.get(task.kind, 0.0))
        return lambda task, start_s: None

    def memory(self) -> DeviceMemory:
        """That of the level that computes, with its capacity; main memory is planned beforehand."""
        if self.kind == "cpu":
            return DeviceMemory(self.torch_device, _NO_LIMIT_BYTES, level="dram")
        assert self.hardware is not None and self.hardware.vram is not None, "it has a GPU"
        capacity_bytes = self.hardware.vram.capacity_bytes
        if self.is_cuda:  # what torch allocates on the way counts, too
            _, total_bytes = torch.cuda.mem_get_info()
            share = (capacity_bytes - CONTEXT_BYTES) / total_bytes
            torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)))
        return DeviceMemory(self.torch_device, capacity_bytes)


IN_MAIN_MEMORY = Device()


class _PacedLink:
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
        _sleep_until(self._free_s)


def _sleep_until(moment_s: float) -> None:
    """Returns at a moment of ``perf_counter``, or at once if it is over."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
