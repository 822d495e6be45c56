"""Reads of experts from disk, as tasks of a timeline."""

from collections.abc import Callable

from moebatch.engine.recorder import Recorder
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span

MakeTask = Callable[[ExpertKey, int, Kind], Task]


class ReadSpans:
    """Records what reader threads do. Several of them keep a disk busy; each has a row."""

    def __init__(self, recorder: Recorder, kind: Kind) -> None:
        self._recorder = recorder
        self._kind = kind
        self.task_of: MakeTask | None = None
        """Set when there is a schedule; reads before that do not count."""
        self.ended: Callable[[Task], None] = lambda task: None
        """Told of what has been read."""

    def __call__(
        self, key: ExpertKey, number: int, slot: int, reader: int, start_s: float, end_s: float
    ) -> None:
        """A reader has read a piece of an expert into a slot."""
        if self.task_of is None:
            return
        lane = "disk->dram" if reader == 0 else f"disk->dram ({reader + 1})"
        start, end = self._recorder.seconds(start_s), self._recorder.seconds(end_s)
        task = self.task_of(key, number, self._kind)
        self._recorder.add(Span(task, lane, start, end, slot, "a free slot"))
        self.ended(task)
