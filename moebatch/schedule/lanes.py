"""Lanes: resources that do one thing at a time, in order; and which task runs on which.

All lanes that there can be stand here once; `lanes_of` says which of them a machine has.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moebatch.schedule.slots.expert_load import Chunk
from moebatch.schedule.task import Kind, Task
from moebatch.spec.machine.hardware import LevelName, LinkName

NUM_READERS = 2
"""Reads of a disk in flight: one more hides the time between two of them."""


class Lane(NamedTuple):
    """What does one thing at a time, or as many as it is wide."""

    name: str
    at: LevelName | LinkName
    """The level that computes, or the link over which bytes go."""
    width: int = 1
    """Things that are done side by side: one launched task at most, the others are chunks. The rate
    of a link is that of all of them together."""

    @property
    def device(self) -> str:
        """What does its work, and that of all lanes of the same device at the same time, each more
        slowly: a disk reads and writes; else every lane has a device of its own."""
        return "disk" if "disk" in self.at else self.name

    @property
    def computes(self) -> bool:
        return "->" not in self.at

    @property
    def has_result(self) -> bool:
        """Whether it computes or stores something; the others bring what will be needed."""
        return self.computes or self.at in ("vram->dram", "dram->disk")

    @property
    def is_of_gpu(self) -> bool:
        """Whether a GPU does its work. Copies into pinned buffers are the CPU's."""
        return "vram" in self.at and self != STAGING


GPU = Lane("gpu", "vram")
CPU = Lane("cpu", "dram")
UP = Lane("dram->vram", "dram->vram")
DOWN = Lane("vram->dram", "vram->dram")
STAGING = Lane("staging", "dram->vram")
BLOCK = Lane("weight block", "dram->vram")
"""FlexGen alone has a stream for the weights of a whole layer."""
READ = Lane("disk->dram", "disk->dram", NUM_READERS)
WRITE = Lane("dram->disk", "dram->disk")

LANES = (GPU, CPU, UP, DOWN, STAGING, BLOCK, READ, WRITE)
"""In the order in which they are shown: processors, then links from the top down."""
PROCESSORS: Mapping[str, LevelName] = {GPU.name: "vram", CPU.name: "dram"}
"""Lanes that compute, with their levels."""
DEVICES: Mapping[str, str] = {lane.name: lane.device for lane in LANES}
"""The device of every lane."""
RESULT_LANES = frozenset(lane.name for lane in LANES if lane.has_result)

_WITH_VRAM: Mapping[Kind, Lane] = {
    **dict.fromkeys(Kind, GPU),
    Kind.ATTN: CPU,
    Kind.OFF: DOWN,
    Kind.KV_DOWN: DOWN,
    Kind.LOAD: UP,
    Kind.CHUNK: UP,
    Kind.PAGE: UP,
    Kind.KV_UP: UP,
    Kind.LAYER_UP: UP,
    Kind.STAGE: STAGING,
    Kind.BLOCK: BLOCK,
    Kind.FETCH: READ,
    Kind.KV_READ: READ,
    Kind.KV_WRITE: WRITE,
}
_WITHOUT_VRAM: Mapping[Kind, Lane] = {
    **dict.fromkeys(Kind, CPU),
    Kind.CHUNK: READ,
    Kind.PAGE: READ,
    Kind.BLOCK: READ,
    Kind.LAYER_UP: READ,
    Kind.KV_READ: READ,
    Kind.KV_UP: READ,
    Kind.KV_DOWN: WRITE,
    Kind.KV_WRITE: WRITE,
}

_LANES_OF: Mapping[LevelName, Mapping[Kind, Lane]] = {"vram": _WITH_VRAM, "dram": _WITHOUT_VRAM}


def lane_of(kind: Kind, compute: LevelName) -> Lane:
    """The lane of tasks of a kind where experts are computed at the level `compute`."""
    return _LANES_OF[compute][kind]


def take_next(
    waiting: deque[Task],
    can_start: Callable[[Task], bool],
    next_chunk: Callable[[], Chunk | None],
    *,
    serves_task: bool,
) -> Task | Chunk | None:
    """What an idle lane does next: the task that was launched first, or a chunk where that one
    cannot start yet and the device serves no other task: chunks come ahead of their use, and what
    is launched is waited for."""
    if waiting and can_start(waiting[0]):
        return waiting.popleft()
    return None if serves_task else next_chunk()


def rows_of(lane: Lane) -> tuple[str, ...]:
    """Rows of a timeline, one for each thing that a lane does side by side; the first one is named
    like the lane."""
    return (lane.name, *(f"{lane.name} ({number})" for number in range(2, lane.width + 1)))


def lane_of_row(row: str) -> str:
    """The lane that a row of a timeline belongs to."""
    return row.partition(" (")[0]
