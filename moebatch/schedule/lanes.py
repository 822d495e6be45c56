"""Lanes: resources that do one thing at a time, in order; and which task runs on which."""

from collections import deque
from collections.abc import Callable, Mapping

from moebatch.schedule.slots.expert_load import Chunk
from moebatch.schedule.task import Kind, Task
from moebatch.spec.hardware import LevelName

LANES = (
    "gpu",
    "cpu",
    "dram->vram",
    "vram->dram",
    "staging",
    "weight block",
    "disk->dram",
    "dram->disk",
)
"""What does one thing at a time. Only FlexGen has a stream for the weights of a whole layer."""
RESULT_LANES = ("gpu", "cpu", "vram->dram", "dram->disk")
"""Lanes that compute or store something; the others bring what will be needed."""

_WITH_VRAM: Mapping[Kind, str] = {
    **dict.fromkeys(Kind, "gpu"),
    Kind.ATTN: "cpu",
    Kind.OFF: "vram->dram",
    Kind.KV_DOWN: "vram->dram",
    Kind.LOAD: "dram->vram",
    Kind.CHUNK: "dram->vram",
    Kind.PAGE: "dram->vram",
    Kind.KV_UP: "dram->vram",
    Kind.STAGE: "staging",
    Kind.BLOCK: "weight block",
    Kind.FETCH: "disk->dram",
    Kind.KV_READ: "disk->dram",
    Kind.KV_WRITE: "dram->disk",
}
_WITHOUT_VRAM: Mapping[Kind, str] = {
    **dict.fromkeys(Kind, "cpu"),
    Kind.CHUNK: "disk->dram",
    Kind.PAGE: "disk->dram",
    Kind.BLOCK: "disk->dram",
    Kind.KV_READ: "disk->dram",
    Kind.KV_UP: "disk->dram",
    Kind.KV_DOWN: "dram->disk",
    Kind.KV_WRITE: "dram->disk",
}

_LANES_OF: Mapping[LevelName, Mapping[Kind, str]] = {"vram": _WITH_VRAM, "dram": _WITHOUT_VRAM}


def lane_of(task: Task, compute: LevelName) -> str:
    """The lane of a task where experts are computed at the level `compute`."""
    return lane_of_kind(task.kind, compute)


def lane_of_kind(kind: Kind, compute: LevelName) -> str:
    """The same for any task of a kind."""
    return _LANES_OF[compute][kind]


def take_next(
    waiting: deque[Task], can_start: Callable[[Task], bool], next_chunk: Callable[[], Chunk | None]
) -> Task | Chunk | None:
    """What an idle lane does next: the task that was launched first, or a chunk where that one
    cannot start yet."""
    if waiting and can_start(waiting[0]):
        return waiting.popleft()
    return next_chunk()


def rows_of(lane: str, width: int) -> tuple[str, ...]:
    """Rows of a timeline, one for each thing that a lane does side by side; the first one is named
    like the lane."""
    return (lane, *(f"{lane} ({number})" for number in range(2, width + 1)))


def lane_of_row(row: str) -> str:
    """The lane that a row of a timeline belongs to."""
    return row.partition(" (")[0]
