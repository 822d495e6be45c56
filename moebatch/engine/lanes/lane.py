"""Lanes: threads that run tasks in the order of their launch, and move experts beside them."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from moebatch.schedule.lanes import Lane, rows_of, take_next
from moebatch.schedule.slots.expert_load import Chunk
from moebatch.schedule.slots.transfer import ChunkStream
from moebatch.schedule.task import Task
from moebatch.store.monitor import End, Monitor
from moebatch.store.statistics import MoveStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMover(ChunkStream):
    """A stream of chunks, and what moves them."""

    move: Callable[[Chunk], None]


class Board:
    """What lanes share: one lock, and which tasks have ended. On this one no task waits for others,
    and a failure stops its lanes for good. All but `sleep` is called with the lock held."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._failure: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether lanes should begin nothing any more."""
        return self._failure is not None

    def can_start(self, task: Task) -> bool:
        """Whether all that a task waits for is done."""
        return True

    def has_ended(self, task: Task) -> bool:
        """Whether a task that has been launched is done."""
        return True

    def ended(
        self, task: Task, lane: str, start_s: float, end_s: float, slots: tuple[int, ...]
    ) -> None:
        """A task has been run, or a chunk has been moved."""

    def failed(self, error: BaseException) -> None:
        """A task has failed: threads that wait for others are woken, and raise it."""
        self._failure = self._failure or error
        self.monitor.changed()

    def sleep(self, condition: Callable[[], bool]) -> None:
        """Sleeps until `condition` holds, on any thread. Raises what a lane failed with."""
        with self.monitor:
            self.monitor.wait_for(lambda: self.holds(condition))

    def holds(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition holds. Raises what a lane failed with."""
        if self._failure is not None:
            raise self._failure
        return condition()


@dataclass(slots=True)
class LaneWork:
    """What a lane does with a task."""

    run: Callable[[Task], None]
    hold: Callable[[Task, float], None] = lambda task, start_s: None
    """Waits until the lane would be done on the machine that is emulated."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    mover: ChunkMover | None = None
    num_bytes: Callable[[Task], int] = lambda task: 0
    """What a task or a chunk moves."""
    rate: float = 0.0
    """Bytes per second of a link, roughly; 0 where that is not known."""
    statistics: MoveStatistics = field(default_factory=MoveStatistics)
    """Where the lane counts what it moves, and the time that it has of its device."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a lane does next: a task that was launched, or a chunk under the name of one."""

    row: str
    """Of the timeline: which of the things that the lane does side by side."""
    task: Task
    chunk: Chunk | None = None


class ThreadLane:
    """A lane of its own threads: a link, or a processor beside the one that launches.

    Launched tasks run one after the other, in their order. Where the next one cannot start yet,
    chunks are moved, as many at once as the lane is wide, while the device serves no task.
    """

    def __init__(self, lane: Lane, board: Board, work: LaneWork) -> None:
        self.name = lane.name
        self._board = board
        self._work = work
        self._busy = work.statistics.busy
        self._in_work: dict[str, Item] = {}
        """By row."""
        self._waiting: deque[Task] = deque()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, args=(row,), name=row, daemon=True)
            for row in rows_of(lane)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        """Whether anything has begun that has not ended; called with the lock held."""
        return bool(self._in_work)

    @property
    def doing(self) -> str | None:
        """What it runs, or else what it would run next if it could; a glance, without the lock."""
        if items := list(self._in_work.values()):
            return ", ".join(str(item.task) for item in items)
        return f"waits to begin {self._waiting[0]}" if self._waiting else None

    def launch(self, task: Task) -> None:
        """Puts a task behind the others; called with the lock held."""
        self._waiting.append(task)
        self._board.monitor.changed()

    def close(self) -> None:
        """Ends the threads after what they run now."""
        with self._board.monitor:
            self._closing = True
            self._board.monitor.changed()
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """Forgets what has been launched, once it runs nothing; called with the lock held."""
        assert not self.is_running, "something is still running"
        self._waiting.clear()

    def _loop(self, row: str) -> None:
        with torch.inference_mode(), self._work.context():
            while not self._closing:
                item: Item | None = None
                try:
                    item = self._take(row)
                    if item is not None:
                        self._do(item)
                except BaseException as error:
                    # Whatever stops a lane must reach the thread that waits for it.
                    self._fail(item, error)

    def _fail(self, item: Item | None, error: BaseException) -> None:
        with self._board.monitor:
            self._board.failed(error)
            if item is not None:
                self._leave(item)
                if item.chunk is not None:
                    self._mover.lost(item.chunk)
                self._board.monitor.changed()

    def _take(self, row: str) -> Item | None:
        """The next task, or a chunk where that one cannot start yet; None at the end."""
        with self._board.monitor:
            item = self._board.monitor.take(lambda: self._find(row), alike=self)
        return item if isinstance(item, Item) else None

    def _find(self, row: str) -> Item | End | None:
        """What there is to do now; from here on it is being done."""
        if self._closing:
            return End()
        item = None if self._board.has_failed else self._next(row)
        if item is not None:
            self._in_work[row] = item
            self._busy.enter(is_task=item.chunk is None)
        return item

    def _leave(self, item: Item) -> None:
        """A row has done what it took, or has failed to, unless it has done with it already; called
        with the lock held."""
        if self._in_work.get(item.row) is item:
            del self._in_work[item.row]
            self._busy.leave(is_task=item.chunk is None)

    def _next(self, row: str) -> Item | None:
        found = take_next(
            self._waiting,
            self._can_begin,
            self._next_chunk,
            serves_task=self._busy.device.num_tasks > 0,
        )
        if not isinstance(found, Chunk):
            return Item(row, found) if found else None
        return Item(row, self._mover.task_of(found), found)

    def _can_begin(self, task: Task) -> bool:
        is_free = all(item.chunk is not None for item in self._in_work.values())
        return is_free and self._can_start(task)

    def _can_start(self, task: Task) -> bool:
        return self._board.can_start(task)

    def _next_chunk(self) -> Chunk | None:
        return self._work.mover.next_chunk() if self._work.mover else None

    @property
    def _mover(self) -> ChunkMover:
        assert self._work.mover is not None, "chunks come from a mover"
        return self._work.mover

    def _do(self, item: Item) -> None:
        start_s = time.perf_counter()
        self._begin(item)
        self._work.hold(item.task, start_s)
        end_s = time.perf_counter()
        with self._board.monitor:
            self._leave(item)
            self._end(item, start_s, end_s)

    def _begin(self, item: Item) -> None:
        """Runs a task or moves a chunk."""
        if item.chunk is None:
            self._work.run(item.task)
        else:
            self._mover.move(item.chunk)

    def _end(self, item: Item, start_s: float, end_s: float) -> None:
        """Reports that something is done; called with the lock held."""
        slots: tuple[int, ...] = ()
        self._work.statistics.num_bytes += self._work.num_bytes(item.task)
        if item.chunk is not None:
            slots = (item.chunk.slot,)
            self._mover.moved(item.chunk)
        self._board.ended(item.task, item.row, start_s, end_s, slots)
        self._board.monitor.changed()
