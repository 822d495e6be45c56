"""Where a run computes: in main memory, on a GPU, or on one that is only emulated."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from moebatch.schedule.task import Kind
from moebatch.spec.hardware import DeviceKind, Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What holds the ``vram`` level, if there is one, and how fast its links are."""

    kind: DeviceKind = "cpu"
    hardware: Hardware | None = None
    """Of an emulated GPU: its capacity, and the rates to which its links are held."""
    num_threads: int = 1
    """Threads that compute, all processors together."""
    least_s: Mapping[Kind, float] = field(default_factory=dict)
    """Seconds that an emulated GPU takes for tasks at least, however fast the CPU computes them."""

    @property
    def with_vram(self) -> bool:
        """Whether there is a GPU, if only an emulated one."""
        return self.kind != "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether there is a real one."""
        return self.kind == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of the level that computes are."""
        return torch.device("cuda" if self.is_cuda else "cpu")

    def pace(self, lane: str) -> float | None:
        """Bytes per second to which an emulated link is held; None if it is not."""
        if self.kind != "emulate" or self.hardware is None:
            return None
        if lane == "staging":
            return self.hardware.links["dram->vram"].staging_bandwidth
        if lane in ("dram->vram", "weight block"):
            return self.hardware.links["dram->vram"].bandwidth
        return self.hardware.links["vram->dram"].bandwidth if lane == "vram->dram" else None


IN_MAIN_MEMORY = Device()
