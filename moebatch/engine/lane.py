"""Lanes: threads that run tasks in the order of their launch, and move experts in between."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moebatch.schedule.slots.expert_load import Chunk
from moebatch.schedule.task import Task
from moebatch.store.monitor import End, Monitor


class Mover(Protocol):
    """What moves experts over a link, chunk by chunk, when no launched task can start."""

    def next_chunk(self) -> Chunk | None:
        """The most urgent chunk; called with the lock held."""

    def task_of(self, chunk: Chunk) -> Task:
        """The chunk as a task of the timeline; called with the lock held."""

    def move(self, chunk: Chunk) -> None:
        """Moves it."""

    def moved(self, chunk: Chunk) -> None:
        """It has arrived; called with the lock held."""

    def lost(self, chunk: Chunk) -> None:
        """It could not be moved; called with the lock held."""


class Board(Protocol):
    """What lanes share: one lock, which tasks have ended, and whoever is told of it."""

    monitor: Monitor

    @property
    def has_failed(self) -> bool:
        """Whether lanes should begin nothing any more; called with the lock held."""

    def can_start(self, task: Task) -> bool:
        """Whether all that a task waits for is done; called with the lock held."""

    def has_ended(self, task: Task) -> bool:
        """Whether a task that has been launched is done; called with the lock held."""

    def ended(self, task: Task, lane: str, start_s: float, end_s: float, slot: int | None) -> None:
        """A task has been run; called with the lock held."""

    def failed(self, error: BaseException) -> None:
        """A task has failed; called with the lock held."""


@dataclass(slots=True)
class LaneWork:
    """What a lane does with a task."""

    run: Callable[[Task], None]
    hold: Callable[[Task, float], None] = lambda task, start_s: None
    """Waits until the lane would be done on the machine that is emulated."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    mover: Mover | None = None
    title: str | None = None
    """Its row of a timeline, if that is not its name: a disk serves several at once."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a lane does next: a task that was launched, or a chunk under the name of one."""

    task: Task
    chunk: Chunk | None = None


class ThreadLane:
    """A lane of its own thread: a link, or a processor beside the one that launches."""

    def __init__(self, name: str, board: Board, work: LaneWork) -> None:
        self.name = name
        self._board = board
        self._work = work
        self._is_busy = False
        self._item: Item | None = None
        self._waiting: deque[Task] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether anything has begun that has not ended; called with the lock held."""
        return self._is_busy

    @property
    def doing(self) -> str | None:
        """What it runs, or else what it would run next if it could; a glance, without the lock."""
        if self._is_busy and self._item is not None:
            return str(self._item.task)
        return f"waits to begin {self._waiting[0]}" if self._waiting else None

    def launch(self, task: Task) -> None:
        """Puts a task behind the others; called with the lock held."""
        self._waiting.append(task)
        self._board.monitor.changed()

    def close(self) -> None:
        """Ends the thread after what it runs now."""
        with self._board.monitor:
            self._closing = True
            self._board.monitor.changed()
        self._thread.join()

    def abandon(self) -> None:
        """Forgets what has been launched, once it runs nothing; called with the lock held."""
        assert not self.is_running, "something is still running"
        self._waiting.clear()

    def _loop(self) -> None:
        with torch.inference_mode(), self._work.context():
            while not self._closing:
                item: Item | None = None
                try:
                    item = self._take()
                    if item is not None:
                        self._do(item)
                except BaseException as error:
                    # Whatever stops a lane must reach whoever waits for it.
                    self._fail(item, error)

    def _fail(self, item: Item | None, error: BaseException) -> None:
        with self._board.monitor:
            self._is_busy = False
            self._board.failed(error)
            if item is not None and item.chunk is not None and self._work.mover is not None:
                self._work.mover.lost(item.chunk)

    def _take(self) -> Item | None:
        """The next task, or a chunk where that one cannot start yet; None at the end."""
        with self._board.monitor as monitor:
            item = monitor.take(self._find)
        return item if isinstance(item, Item) else None

    def _find(self) -> Item | End | None:
        """What there is to do now; from here on it is being done."""
        if self._closing:
            return End()
        item = None if self._board.has_failed else self._next()
        if item is not None:
            self._is_busy, self._item = True, item
        return item

    def _next(self) -> Item | None:
        if self._waiting and self._can_start(self._waiting[0]):
            return Item(self._waiting.popleft())
        mover = self._work.mover
        chunk = mover.next_chunk() if mover else None
        return Item(mover.task_of(chunk), chunk) if mover and chunk else None

    def _can_start(self, task: Task) -> bool:
        return self._board.can_start(task)

    def _do(self, item: Item) -> None:
        start_s = time.perf_counter()
        self._begin(item)
        self._work.hold(item.task, start_s)
        end_s = time.perf_counter()
        with self._board.monitor:
            self._is_busy = False
            self._end(item, start_s, end_s)

    def _begin(self, item: Item) -> None:
        """Runs a task or moves a chunk."""
        if item.chunk is None:
            self._work.run(item.task)
            return
        assert self._work.mover is not None, "chunks come from a mover"
        self._work.mover.move(item.chunk)

    def _end(self, item: Item, start_s: float, end_s: float) -> None:
        """Tells that something is done; called with the lock held."""
        slot = None
        if item.chunk is not None:
            assert self._work.mover is not None, "chunks come from a mover"
            slot = item.chunk.slot
            self._work.mover.moved(item.chunk)
        self._board.ended(item.task, self._work.title or self.name, start_s, end_s, slot)
        self._board.monitor.changed()


class InlineLane:
    """The lane of whoever launches: a task is done when `launch` returns."""

    def __init__(self, name: str, board: Board, work: LaneWork) -> None:
        self.name = name
        self._board = board
        self._work = work
        self.task: Task | None = None
        """What it runs, or ran last."""

    def run(self, task: Task) -> None:
        """Runs a task whose time has come; called without the lock."""
        self.task = task
        start_s = time.perf_counter()
        self._work.run(task)
        end_s = time.perf_counter()
        with self._board.monitor:
            self._board.ended(task, self.name, start_s, end_s, None)
            self._board.monitor.changed()

    def close(self) -> None:
        """Has nothing to end."""
