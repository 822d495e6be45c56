"""Experts read ahead of what computes them, without a schedule: the reference, and measurements."""

import time
from collections.abc import Callable, Collection, Generator, Iterable

from torch import Tensor

from moebatch.engine.lanes.lane import Board, ChunkMover, LaneWork, ThreadLane
from moebatch.schedule.lanes import NUM_READERS, READ
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.task import Task
from moebatch.store.experts.dram import ExpertStore
from moebatch.store.statistics import ReadStatistics

Ready = Generator[tuple[int, tuple[Tensor, ...]], None, None]


class ReadAhead:
    """An `ExpertStore` with a lane that fills its slots, most urgent expert first.

    One thread *prefetches* experts that are likely to be needed and *requires* those that a gate
    has chosen. So it cannot block with one slot, and with several the lane reads while the experts
    before are computed.
    """

    def __init__(self, store: ExpertStore, *, num_readers: int = NUM_READERS) -> None:
        """`store` stays the caller's, who closes it after this."""
        self.store = store
        self.statistics = ReadStatistics(is_direct=store.is_direct)
        self._board = Board(store.monitor)
        work = LaneWork(
            run=_nothing_is_launched,
            mover=ChunkMover(slots=store.slots, move=store.read),
            num_bytes=_bytes_read(store),
            statistics=self.statistics,
        )
        self._lane = ThreadLane(READ._replace(width=num_readers), self._board, work)

    def prefetch(self, upcoming: Iterable[ExpertKey]) -> None:
        """Reads `upcoming` experts ahead, in this order, as far as there are slots to hold them."""
        with self.store.monitor:
            self.store.slots.prefetch(upcoming)
            self.store.monitor.changed()

    def require(self, layer: int, experts: Collection[int]) -> Ready:
        """Each of `experts` with its tensors, in the order in which they are ready.

        Reading starts with the call, so what is prefetched after it comes behind them. The tensors
        are valid until the next one is asked for. Prefetches of experts of the layer that are not
        among them are cancelled. Raises what reading failed with.
        """
        waiting, slots = [ExpertKey(layer, expert) for expert in experts], self.store.slots
        with self.store.monitor:
            slots.withdraw(layer, keep=experts)
            for key in waiting:
                assert slots.num_streaming_slots or slots.holds(key), "streaming needs a slot"
                slots.require(key)
            self.store.monitor.changed()
        return self._as_ready(waiting)

    def sleep(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition` holds, which is looked at with the lock held. Raises what
        reading failed with."""
        self._board.sleep(condition)

    def forget_required(self) -> None:
        """Makes required experts prefetched ones again, after a pass that was given up."""
        with self.store.monitor:
            self.store.slots.forget()
            self.store.monitor.changed()

    def close(self) -> None:
        """Stops reading after what is in flight."""
        self._lane.close()

    def _as_ready(self, waiting: list[ExpertKey]) -> Ready:
        while waiting:
            key = self._use_first(waiting)
            waiting.remove(key)
            try:
                yield key.expert, self.store.tensors(key)
            finally:
                with self.store.monitor:
                    self.store.slots.finish(key, keep=False)
                    self.store.monitor.changed()

    def _use_first(self, waiting: list[ExpertKey]) -> ExpertKey:
        """The first expert that can be computed now; waits until there is one."""
        slots = self.store.slots
        with self.store.monitor:
            start_s = time.perf_counter()
            self.sleep(lambda: any(map(slots.is_ready, waiting)))
            self.statistics.waited_s += time.perf_counter() - start_s
            key = slots.ready(waiting)[0]
            slots.use(key)
            return key


def _nothing_is_launched(task: Task) -> None:
    raise AssertionError(f"only chunks are read here, not {task}")


def _bytes_read(store: ExpertStore) -> Callable[[Task], int]:
    def num_bytes(task: Task) -> int:
        assert task.expert is not None and task.part is not None, "a chunk of an expert"
        return store.chunk_bytes(ExpertKey(task.step, task.expert), task.part)

    return num_bytes
