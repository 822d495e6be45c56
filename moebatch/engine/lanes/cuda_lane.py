"""Lanes of a real GPU: each has a stream, and a task waits for those of others there.

A task has ended when the GPU says so, not when it has been issued. Why nothing is overwritten, or
given back to the allocator, while another stream still uses it:

- What streams share (weights, slots, halves, cache, windows, exchange buffers, pinned memory) is
  allocated before the first lane begins and lives until the last has ended.
- What is allocated on the way, by tasks or by the thread that launches, is used on one
  stream: for hidden states, routings and plans of attention that of `CudaStreams.compute`. Memory
  that is freed is given out again on the same stream, behind its last use.
- Whether a slot, a half, a window or a pinned buffer may be filled again is the schedule's
  business. It goes by ends, which the GPU reports, and by ``after``: a stream waits for the
  event of such a task, and that event is behind all that the task has issued.
- The host reads what came down, or fills what went up, only in tasks of other lanes, which wait
  for the ends of tasks of these.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from moebatch.engine.lanes.lane import Board, Item, LaneWork, ThreadLane
from moebatch.engine.lanes.streams import Event, Gpu, Stream, StreamClock
from moebatch.schedule.lanes import Lane
from moebatch.schedule.task import Task

MAX_ISSUED = 64
"""Tasks of a lane that have been issued and have not ended."""
MAX_ISSUED_BEFORE_CHUNK = 2
"""The same where chunks of experts move in between: one on its way, and one behind it so that the
link is never idle. A chunk that turns out to be more urgent waits for these."""
ISSUED_BEFORE_CHUNK_S = 0.003
"""More of them where they are small: a link needs so much ahead of it that the host may be late for
the next one. One expert of 9 MB takes 0.2 ms at 50 GB/s, waking up and issuing was estimated at
0.3 ms."""
SWITCH_S = 2e-4
"""After so long a thread lets others issue and look after ends; Python's own 5 ms are those of a
whole layer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """Something that has been issued."""

    item: Item
    chunk_bytes: int
    """Of a chunk; 0 for a task."""
    stream: Stream
    issued_s: float
    start: Event
    end: Event


class CudaStreams:
    """What the lanes of one GPU share: its clock, and what they have issued."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        self.gpu = gpu or Gpu()
        self.compute = self.gpu.stream()
        self.clock = StreamClock(self.gpu)
        self.issued: dict[Task, _Flight] = {}
        """Launched tasks that have been issued and whose ends have not been seen; looked at with
        the lock of the lanes held."""

    def computing(self) -> AbstractContextManager[Any]:
        """For the thread that launches: it computes something before a pass and after it."""
        return self.gpu.use(self.compute)


class CudaLane(ThreadLane):
    """A stream, a thread that issues, and one that waits for what has been issued."""

    def __init__(
        self, lane: Lane, board: Board, work: LaneWork, streams: CudaStreams, stream: Stream
    ) -> None:
        self._streams = streams
        self._stream = stream
        self._flights: set[_Flight] = set()
        # Beside the lock: the thread that waits for ends need not wake up for anything else.
        self._to_watch: SimpleQueue[_Flight | None] = SimpleQueue()
        self._reported_s = 0.0
        super().__init__(lane, board, replace(work, context=lambda: streams.gpu.use(stream)))
        self._watcher = threading.Thread(
            target=self._watch, name=f"{lane.name} (ends)", daemon=True
        )
        self._watcher.start()

    @property
    def is_running(self) -> bool:
        """Whether anything has begun that has not ended; called with the lock held."""
        return bool(self._in_work or self._flights)

    def close(self) -> None:
        """Ends the threads after what has been issued."""
        super().close()
        self._to_watch.put(None)
        self._watcher.join()

    # --- the thread that issues -----------------------------------------------------------------

    def _next(self, row: str) -> Item | None:
        return super()._next(row) if self._has_room else None

    @property
    def _has_room(self) -> bool:
        """Whether something may be issued behind what has not ended."""
        count = len(self._flights)
        if self._work.mover is None or count >= MAX_ISSUED:
            return count < MAX_ISSUED
        chunk_bytes = sum(flight.chunk_bytes for flight in self._flights)
        is_late = chunk_bytes < self._work.rate * ISSUED_BEFORE_CHUNK_S
        return count < MAX_ISSUED_BEFORE_CHUNK or is_late

    def _can_start(self, task: Task) -> bool:
        """Whether it can be issued: what it waits for has ended, or a stream can wait for it.

        Where experts move in between the stream must not wait: they would have to wait behind it.
        """
        if self._work.mover is not None:
            return self._board.can_start(task)
        issued = self._streams.issued
        return all(other in issued or self._board.has_ended(other) for other in task.after)

    def _do(self, item: Item) -> None:
        gpu, stream = self._streams.gpu, self._stream
        start, end = gpu.event(blocking=True), gpu.event(blocking=True)
        chunk_bytes = 0 if item.chunk is None else self._work.num_bytes(item.task)
        flight = _Flight(item, chunk_bytes, stream, time.perf_counter(), start, end)
        try:
            for event in self._awaited(item.task):
                stream.wait_event(event)
            start.record(stream)
            self._begin(item)
            end.record(stream)
        except BaseException:
            # What has been issued of it is done before others learn of the failure.
            with suppress(Exception):
                stream.synchronize()
            raise
        with self._board.monitor:
            self._leave(item)
            self._flights.add(flight)
            if item.chunk is None:
                self._streams.issued[item.task] = flight
                self._board.monitor.changed()
        self._to_watch.put(flight)

    def _awaited(self, task: Task) -> list[Event]:
        """Ends on other streams that this task waits for; those that are not there have come."""
        with self._board.monitor:
            found = [self._streams.issued.get(other) for other in task.after]
        return [flight.end for flight in found if flight and flight.stream is not self._stream]

    # --- the thread that waits ------------------------------------------------------------------

    def _watch(self) -> None:
        monitor = self._board.monitor
        while (flight := self._to_watch.get()) is not None:
            try:
                flight.end.synchronize()
                start_s, end_s = self._times(flight)
                with monitor:
                    self._wait_for_others(flight.item.task)
                    self._forget(flight)
                    self._end(flight.item, start_s, end_s)
            except BaseException as error:
                with monitor:  # or the lane would seem to be done before others learn of it
                    self._forget(flight)
                    self._fail(flight.item, error)

    def _times(self, flight: _Flight) -> tuple[float, float]:
        """Start and end in seconds of ``perf_counter``. Two clocks never agree exactly, but what
        the host has seen comes first."""
        seen_s = time.perf_counter()
        start_s, end_s = self._streams.clock.seconds(flight.start, flight.end)
        start_s = min(max(start_s, flight.issued_s, self._reported_s), seen_s)
        self._reported_s = end_s = min(max(start_s, end_s), seen_s)
        return start_s, end_s

    def _wait_for_others(self, task: Task) -> None:
        """Ends are reported in an order that makes sense: other threads may see theirs later."""
        board = self._board
        board.monitor.wait_for(lambda: board.has_failed or board.can_start(task))

    def _forget(self, flight: _Flight) -> None:
        self._flights.discard(flight)
        self._streams.issued.pop(flight.item.task, None)


def cuda_lanes(board: Board, streams: CudaStreams) -> Callable[[Lane, LaneWork], ThreadLane]:
    """Makes lanes: with a stream for what the GPU does, plain threads for everything else."""
    # Weights and zeros have been put there on the stream of the thread that loaded them.
    streams.gpu.settle()

    def make(lane: Lane, work: LaneWork) -> ThreadLane:
        if not lane.is_of_gpu:
            return ThreadLane(lane, board, work)
        stream = streams.compute if lane.computes else streams.gpu.stream()
        return CudaLane(lane, board, work, streams, stream)

    return make
