"""The executor: lanes as a schedule's driver and a reader of timelines see them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moebatch.engine.lanes.executor import Executor
from moebatch.engine.lanes.lane import LaneWork, ThreadLane
from moebatch.engine.lanes.recorder import Recorder
from moebatch.schedule.lanes import CPU, LANES, READ
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Kind, Task, attend
from moebatch.schedule.timeline.timeline import LAUNCH
from moebatch.store.monitor import Monitor
from tests.patience import until

SETUP = Setup(
    num_layers=1,
    num_experts=1,
    moe_layers=frozenset(),
    num_hot=1,
    window=1,
    lanes=LANES,
    compute="dram",
)


class Told:
    """In place of a driver: launches what it is told; the second time it waits for that task."""

    def __init__(self, executor: Executor, tasks: Sequence[Task]) -> None:
        self._executor = executor
        self._tasks = tasks
        self._launched = set[Task]()

    def start(self) -> None:
        pass

    def run_pass(self, sweep: Sweep) -> None:
        for task in self._tasks:
            if task in self._launched:
                self._wait_for(task)
            else:
                self._executor.launch(task)
                self._launched.add(task)
        self._executor.wait(lambda: self._executor.is_idle(results_only=False), "everything")

    def task_ended(self, task: Task) -> None:
        pass

    def _wait_for(self, task: Task) -> None:
        self._executor.wait(lambda: self._executor.has_ended(task), str(task))


@contextmanager
def executor_of(recorder: Recorder) -> Iterator[Executor]:
    """With one lane that reads, each time until the thread that launches waits for something."""
    executor = Executor(SETUP, recorder, Monitor())

    def read(task: Task) -> None:
        until(lambda: "launching: waits for" in executor.doing())

    executor.add_inline(CPU.name, lambda task: None)
    executor.add(ThreadLane(READ._replace(width=1), executor, LaneWork(run=read)))
    try:
        yield executor
    finally:
        executor.close()


def test_a_timeline_says_what_each_task_has_waited_for() -> None:
    first = Task(Kind.KV_READ, 0)
    waits = attend(0, 0, first)
    late, later = attend(0, 1, first), Task(Kind.KV_READ, 1, after=(first,))
    behind, last = Task(Kind.KV_READ, 2, after=(later,)), attend(0, 2)
    recorder = Recorder(num_layers=1, num_traced_passes=1)
    with executor_of(recorder) as executor:
        driver: Any = Told(executor, [first, waits, late, later, behind, behind, last])
        executor.drive(driver)
        executor.run_pass(Sweep(num_micro_batches=2))
    reasons = {span.task: span.waited_for for span in recorder.timeline.spans}
    assert reasons == {
        first: LAUNCH,
        waits: str(first),
        late: LAUNCH,  # what it comes after had ended before it was launched
        later: LAUNCH,
        behind: str(later),
        last: str(behind),  # which the driver waited for
    }
    assert executor.num_ended == 6
