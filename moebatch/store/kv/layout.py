"""Where keys and values live, where attention is computed, and which windows that takes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moebatch.schedule.steps.kv_route import Place, WindowName, windows
from moebatch.spec.machine.hardware import LevelName

_HOST = torch.device("cpu")
_MAIN: Place = "dram"


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """Where keys and values live, where attention is computed, and how large windows are."""

    levels: Sequence[LevelName]
    """Home of each layer."""
    places: Collection[Place] = (_MAIN,)
    """Levels at which attention is computed; with a GPU, ``vram`` is always among them."""
    window_pages: Sequence[int] = ()
    """Most pages of one micro-batch in each group of layers; needed where a layer lives elsewhere
    than it attends."""
    vram_device: torch.device = _HOST
    """The CPU for a GPU that is emulated."""
    folder: Path | None = None
    """Where the scratch file goes; needed where layers live on disk."""

    @property
    def top(self) -> Place:
        """The highest level that attends."""
        return "vram" if "vram" in self.places else _MAIN

    @property
    def has_cuda(self) -> bool:
        """Whether that GPU is a real one, to which host memory should be pinned."""
        return self.vram_device.type == "cuda"

    def device(self, level: LevelName) -> torch.device:
        return self.vram_device if level == "vram" else _HOST

    @property
    def windows(self) -> frozenset[WindowName]:
        """Those that are needed: at each stop of a route that is not home."""
        return windows(frozenset(self.levels), frozenset(self.places), self.top)
