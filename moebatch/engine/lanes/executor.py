"""The executor: a schedule on real lanes."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from moebatch.engine.lanes.lane import Board, ThreadLane
from moebatch.engine.lanes.recorder import Recorder
from moebatch.schedule.drivers.driver import Driver, Lanes
from moebatch.schedule.lanes import RESULT_LANES, lane_of
from moebatch.schedule.request import Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import FREE_SLOT, LAUNCH, Launch, Span, last_awaited
from moebatch.store.monitor import Monitor

_MOST_PENDING = 2000
"""Tasks that are launched ahead: more would only take memory. All wait for earlier ones, so those
that are there can always end."""


class GivenUp(Exception):
    """Keeps lanes from beginning anything while a pass is given up."""


class Executor(Board, Lanes):
    """Lanes as threads, with one lock for all of them and for the slots of experts.

    The main lane is that of the thread that launches where there is no GPU: with nothing else to
    do it would only wait.
    """

    def __init__(self, setup: Setup, recorder: Recorder, monitor: Monitor) -> None:
        """`monitor` is the lock of all slots."""
        super().__init__(monitor)
        self._setup = setup
        self._recorder = recorder
        self._lanes: dict[str, ThreadLane] = {}
        self._inline: tuple[str, Callable[[Task], None]] | None = None
        """The lane of the thread that launches, and what it does with a task."""
        self._inline_task: Task | None = None
        """What it runs, or ran last."""
        self._driver: Driver | None = None
        self._pending: dict[Task, Launch] = {}
        self._num_ended = 0
        self._waits_for: str | None = None
        self._num_results = 0
        """Pending tasks that compute or store something."""
        self._ended_s: dict[Task, float] = {}
        self._last_ended: Task | str = LAUNCH
        self._woken_by = LAUNCH
        """What the launcher last slept for; nothing when a pass begins."""

    def add(self, lane: ThreadLane) -> None:
        """A lane that has threads of its own."""
        self._lanes[lane.name] = lane

    def add_inline(self, name: str, run: Callable[[Task], None]) -> None:
        """The lane of the thread that calls `run_pass`: a task is done when `run` returns."""
        self._inline = name, run

    def drive(self, driver: Driver) -> None:
        """Lanes are driven by `driver` from now on."""
        with self.monitor:
            if isinstance(self._failure, GivenUp):
                self._failure = None
            self._driver = driver
            self.monitor.changed()
        driver.start()

    def run_pass(self, sweep: Sweep) -> None:
        """Goes through one pass. Raises what a lane failed with."""
        assert self._driver is not None, "a driver has been given"
        self._woken_by = LAUNCH
        self._driver.run_pass(sweep)
        self._recorder.end_pass()
        with self.monitor:
            self._ended_s.clear()

    def abandon(self) -> None:
        """Forgets a pass that failed, once no lane runs any of it. Lanes stand still until `drive`
        is called again."""
        lanes = self._lanes.values()
        with self.monitor:
            self._failure = self._failure or GivenUp()
            self.monitor.changed()
            self.monitor.wait_for(lambda: not any(lane.is_running for lane in lanes))
            for lane in lanes:
                lane.abandon()
            self._pending.clear()
            self._ended_s.clear()
            self._num_results = 0
            self._failure = GivenUp()
        self._recorder.drop_pass()

    @property
    def num_ended(self) -> int:
        """Tasks that have ended so far."""
        return self._num_ended

    def doing(self) -> str:
        """What the lanes do, or wait for, in words. Takes no lock: it is asked when all stands
        still."""
        said = {name: lane.doing for name, lane in self._lanes.items()}
        if self._inline is not None and self._inline_task is not None:
            said[self._inline[0]] = f"began {self._inline_task}"
        if self._waits_for is not None:
            said["launching"] = f"waits for {self._waits_for}"
        return "; ".join(f"{name}: {what}" for name, what in said.items() if what) or "nothing"

    def close(self) -> None:
        """Ends all lanes."""
        for lane in self._lanes.values():
            lane.close()

    # --- lanes, as the driver sees them ---------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self.monitor

    def launch(self, task: Task) -> None:
        name = self._lane_of(task)
        with self.monitor:
            self.wait(lambda: len(self._pending) < _MOST_PENDING, str(task))
            self._pending[task] = Launch(self._recorder.now(), self._woken_by)
            self._num_results += name in RESULT_LANES
            if self._inline is None or name != self._inline[0]:
                self._lanes[name].launch(task)
                return
        self.wait(lambda: self.can_start(task), str(task))
        self._run_inline(task, *self._inline)
        self._woken_by = LAUNCH

    def _run_inline(self, task: Task, name: str, run: Callable[[Task], None]) -> None:
        self._inline_task = task
        start_s = time.perf_counter()
        run(task)
        end_s = time.perf_counter()
        with self.monitor:
            self.ended(task, name, start_s, end_s, ())
            self.monitor.changed()

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        with self.monitor:
            if not self.holds(condition):
                self._waits_for = reason
                self.sleep(condition)
                self._woken_by = str(self._last_ended)
            self._waits_for = None

    def slots_changed(self) -> None:
        self.monitor.changed()

    def has_ended(self, task: Task) -> bool:
        return task not in self._pending

    def is_idle(self, *, results_only: bool) -> bool:
        return not (self._num_results if results_only else self._pending)

    # --- the board, as lanes see it -------------------------------------------------------------

    def can_start(self, task: Task) -> bool:
        return not any(other in self._pending for other in task.after)

    def ended(
        self, task: Task, lane: str, start_s: float, end_s: float, slots: tuple[int, ...]
    ) -> None:
        start, end = self._recorder.seconds(start_s), self._recorder.seconds(end_s)
        if task.kind is Kind.EXPERT and self._driver is not None:
            slots = self._driver.slots_of(task)
        launch = self._pending.get(task)
        reason = FREE_SLOT if launch is None else last_awaited(task, self._ended_s, launch)
        self._recorder.add(Span(task, lane, start, end, slots, reason, launch))
        self._last_ended = task
        self._num_ended += 1
        if task in self._pending:
            assert self._driver is not None, "tasks are launched by a driver"
            del self._pending[task]
            self._num_results -= self._lane_of(task) in RESULT_LANES
            self._ended_s[task] = end
            self._driver.task_ended(task)

    def _lane_of(self, task: Task) -> str:
        return lane_of(task.kind, self._setup.compute).name
