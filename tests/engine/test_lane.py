"""Lanes of threads: what a wide one does side by side, and what it counts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moebatch.engine.lanes.lane import Board, ChunkMover, LaneWork, ThreadLane
from moebatch.schedule.lanes import READ
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.slots.transfer import DiskPath
from moebatch.schedule.task import Kind, Task
from moebatch.store.monitor import Monitor
from moebatch.store.statistics import BusyClock, MoveStatistics, ReadStatistics
from tests.patience import PATIENCE_S, until

KEYS = [ExpertKey(0, expert) for expert in range(4)]


class Kept(Board):
    """Everything may start; what has ended is kept."""

    def __init__(self) -> None:
        super().__init__(Monitor())
        self.ends: list[tuple[Task, str]] = []

    def ended(
        self, task: Task, lane: str, start_s: float, end_s: float, slots: tuple[int, ...]
    ) -> None:
        self.ends.append((task, lane))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            with self.monitor:
                return condition()

        until(holds)


def launched(*steps: int) -> list[Task]:
    return [Task(Kind.KV_READ, step) for step in steps]


@contextmanager
def lane_of(board: Kept, work: LaneWork, width: int = 1) -> Iterator[ThreadLane]:
    lane = ThreadLane(READ._replace(width=width), board, work)
    try:
        yield lane
    finally:
        lane.close()


def chunks(board: Kept, slots: SlotQueue, move: Callable[[Chunk], None]) -> ChunkMover:
    with board.monitor:
        slots.prefetch(KEYS)
    return ChunkMover(slots=slots, move=move)


@pytest.mark.parametrize("width", [2, 3])
def test_as_many_chunks_move_at_once_as_the_lane_is_wide(width: int) -> None:
    board, slots = Kept(), SlotQueue(dict.fromkeys(KEYS, 3), num_slots=4)
    together = threading.Barrier(width, timeout=PATIENCE_S)
    mover = chunks(board, slots, lambda chunk: together.wait() and None)
    statistics = ReadStatistics()
    work = LaneWork(
        run=lambda task: None,
        mover=mover,
        num_bytes=lambda task: 5,
        statistics=statistics,
    )
    with lane_of(board, work, width):
        board.wait_for(lambda: len(board.ends) == 12)
    assert {row for _, row in board.ends} == {
        "disk->dram",
        *(f"disk->dram ({number})" for number in range(2, width + 1)),
    }
    assert statistics.num_bytes == 5 * 12
    assert statistics.busy.total_s > 0


def test_launched_tasks_run_one_after_the_other_in_a_wide_lane_too() -> None:
    board, running, most = Kept(), [], []

    def run(task: Task) -> None:
        running.append(task)
        most.append(len(running))
        running.remove(task)

    tasks = launched(*range(200))
    with lane_of(board, LaneWork(run=run), 4) as lane:
        with board.monitor:
            for task in tasks:
                lane.launch(task)
        board.wait_for(lambda: len(board.ends) == len(tasks))
    assert max(most) == 1
    assert [task for task, _ in board.ends] == tasks


@pytest.mark.parametrize("is_own", [True, False], ids=["of the lane", "of another lane"])
def test_chunks_wait_while_the_device_serves_a_task(is_own: bool) -> None:
    board, slots = Kept(), SlotQueue(dict.fromkeys(KEYS, 1), num_slots=4)
    has_begun, is_asked = threading.Event(), threading.Event()

    def run(task: Task) -> None:
        has_begun.set()
        assert is_asked.wait(PATIENCE_S)
        time.sleep(0.05)  # for a lane that would not wait

    reads = MoveStatistics()
    reading = LaneWork(
        run=run, mover=ChunkMover(slots=slots, move=lambda chunk: None), statistics=reads
    )
    writes = MoveStatistics(busy=BusyClock(reads.busy.device))
    with (
        lane_of(board, reading, 2) as lane,
        lane_of(board, LaneWork(run=run, statistics=writes)) as other,
    ):
        with board.monitor:
            (lane if is_own else other).launch(*launched(0))
        assert has_begun.wait(PATIENCE_S)
        with board.monitor:
            slots.prefetch(KEYS)
            board.monitor.changed()
        is_asked.set()
        board.wait_for(lambda: all(map(slots.is_ready, KEYS)))
    assert board.ends[0][0] == Task(Kind.KV_READ, 0)


@pytest.mark.parametrize("resident", [(), KEYS])
def test_a_chunk_that_fails_stops_the_lane_and_leaves_slots_in_order(
    resident: list[ExpertKey],
) -> None:
    board = Kept()
    slots = SlotQueue(dict.fromkeys(KEYS, 2), num_slots=4 - len(resident), resident=resident)

    def fail(chunk: Chunk) -> None:
        raise OSError("disk broke")

    mover = chunks(board, slots, fail)
    statistics = ReadStatistics()
    work = LaneWork(run=lambda task: None, mover=mover, statistics=statistics)
    with lane_of(board, work, 2) as lane:
        board.wait_for(lambda: board.has_failed and not lane.is_running)
    slots.check_integrity()
    assert statistics.num_bytes == 0
    assert not board.ends


def test_a_task_that_fails_is_raised_where_it_is_waited_for_and_nothing_follows_it() -> None:
    board, slots, ran = Kept(), SlotQueue(dict.fromkeys(KEYS, 1), num_slots=4), list[Task]()

    def fail(task: Task) -> None:
        ran.append(task)
        raise OSError("disk broke")

    mover = ChunkMover(slots=slots, move=lambda chunk: None)
    with lane_of(board, LaneWork(run=fail, mover=mover), 2) as lane:
        with board.monitor:
            for task in launched(0, 1):
                lane.launch(task)
            slots.prefetch(KEYS)
        with pytest.raises(OSError, match="disk broke"):
            board.sleep(lambda: bool(board.ends))
        board.wait_for(lambda: not lane.is_running)
        assert lane.doing == f"waits to begin {launched(1)[0]}"
    assert ran == launched(0)
    slots.check_integrity()


def test_what_goes_wrong_where_a_lane_looks_for_work_is_raised_where_it_is_waited_for() -> None:
    board, slots = Kept(), SlotQueue(dict.fromkeys(KEYS, 1), num_slots=4)

    def fail() -> DiskPath:
        raise OSError("no way")

    mover = ChunkMover(slots=slots, move=lambda chunk: None, path=fail)
    with lane_of(board, LaneWork(run=lambda task: None, mover=mover), 2) as lane:
        with pytest.raises(OSError, match="no way"):
            board.sleep(lambda: bool(board.ends))
        assert not lane.is_running


def test_a_lane_says_what_it_runs_and_else_what_it_would_run_next() -> None:
    class Held(Kept):
        may_start = False

        def can_start(self, task: Task) -> bool:
            return self.may_start

    board, has_begun, may_end = Held(), threading.Event(), threading.Event()

    def run(task: Task) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE_S)

    first, second = launched(0, 1)
    with lane_of(board, LaneWork(run=run)) as lane:
        assert lane.doing is None
        with board.monitor:
            lane.launch(first)
            lane.launch(second)
        assert lane.doing == f"waits to begin {first}"
        with board.monitor:
            board.may_start = True
            board.monitor.changed()
        assert has_begun.wait(PATIENCE_S)
        assert lane.doing == str(first)
        may_end.set()
        board.wait_for(lambda: len(board.ends) == 2)
