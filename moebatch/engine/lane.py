"""Lanes: threads that run tasks in the order of their launch, and move experts in between."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moebatch.schedule.slots import Chunk
from moebatch.schedule.task import Task


class Mover(Protocol):
    """What moves experts over a link, chunk by chunk, when no launched task can start."""

    def next_chunk(self) -> Chunk | None:
        """The most urgent chunk; called with the lock held."""

    def task_of(self, chunk: Chunk) -> Task:
        """The chunk as a task of the timeline."""

    def move(self, chunk: Chunk) -> None:
        """Moves it."""

    def moved(self, chunk: Chunk) -> None:
        """It has arrived; called with the lock held."""


class Board(Protocol):
    """What lanes share: one lock, which tasks have ended, and whoever is told of it."""

    changed: threading.Condition

    @property
    def has_failed(self) -> bool:
        """Whether lanes should begin nothing any more; called with the lock held."""

    def can_start(self, task: Task) -> bool:
        """Whether all that a task waits for is done; called with the lock held."""

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


class ThreadLane:
    """A lane of its own thread: a link, or a processor beside the one that launches."""

    def __init__(self, name: str, board: Board, work: LaneWork) -> None:
        self.name = name
        self.is_running = False
        self._board = board
        self._work = work
        self._waiting: deque[Task] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def launch(self, task: Task) -> None:
        """Puts a task behind the others; called with the lock held."""
        self._waiting.append(task)
        self._board.changed.notify_all()

    def close(self) -> None:
        """Ends the thread after what it runs now."""
        with self._board.changed:
            self._closing = True
            self._board.changed.notify_all()
        self._thread.join()

    def abandon(self) -> None:
        """Forgets what has been launched, once it runs nothing; called with the lock held."""
        assert not self.is_running, "something is still running"
        self._waiting.clear()

    def _loop(self) -> None:
        with torch.inference_mode(), self._work.context():
            while (item := self._take()) is not None:
                try:
                    self._do(item)
                except BaseException as error:
                    # Whatever stops a lane must reach whoever waits for it.
                    with self._board.changed:
                        self.is_running = False
                        self._board.failed(error)

    def _take(self) -> Task | Chunk | None:
        """The next task, or a chunk where that one cannot start yet; None at the end."""
        board = self._board
        with board.changed:
            while not self._closing:
                item = None if board.has_failed else self._next()
                if item is not None:
                    self.is_running = True
                    return item
                board.changed.wait()
            return None

    def _next(self) -> Task | Chunk | None:
        if self._waiting and self._board.can_start(self._waiting[0]):
            return self._waiting.popleft()
        mover = self._work.mover
        return mover.next_chunk() if mover else None

    def _do(self, item: Task | Chunk) -> None:
        start_s = time.perf_counter()
        if isinstance(item, Task):
            self._work.run(item)
            self._work.hold(item, start_s)
            self._finish(item, start_s, None)
            return
        mover = self._work.mover
        assert mover is not None, "chunks come from a mover"
        task = mover.task_of(item)
        mover.move(item)
        self._work.hold(task, start_s)
        self._finish(task, start_s, item)

    def _finish(self, task: Task, start_s: float, chunk: Chunk | None) -> None:
        end_s = time.perf_counter()
        board = self._board
        with board.changed:
            self.is_running = False
            if chunk is not None:
                assert self._work.mover is not None
                self._work.mover.moved(chunk)
            board.ended(task, self._work.title or self.name, start_s, end_s, chunk.slot if chunk else None)
            board.changed.notify_all()


class InlineLane:
    """The lane of whoever launches: a task is done when `launch` returns."""

    def __init__(self, name: str, board: Board, work: LaneWork) -> None:
        self.name = name
        self._board = board
        self._work = work

    def run(self, task: Task) -> None:
        """Runs a task whose time has come; called without the lock."""
        start_s = time.perf_counter()
        self._work.run(task)
        end_s = time.perf_counter()
        with self._board.changed:
            self._board.ended(task, self.name, start_s, end_s, None)
            self._board.changed.notify_all()

    def close(self) -> None:
        """Has nothing to end."""
