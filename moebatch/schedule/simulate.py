"""The simulator: a schedule on lanes with a virtual clock."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from moebatch.schedule.driver import Driver, Lanes, Router
from moebatch.schedule.foresight import Foresight
from moebatch.schedule.lanes import RESULT_LANES, lane_of, take_next
from moebatch.schedule.registry import find_schedule
from moebatch.schedule.request import Schedule, Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.cache import Cache, Rule, make_cache
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.slots.transfer import ChunkStream
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import Span, Timeline


class World(Router, Protocol):
    """What is computed, as far as it takes time."""

    def begin_pass(self, number: int) -> Sweep:
        """The pass of that number, from which tasks come next."""

    def seconds(self, task: Task) -> float:
        """How long a task takes on its lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Slots for experts at the level that computes, and in main memory below it."""

    num_slots: int
    resident: frozenset[ExpertKey] = frozenset()
    """Experts that live where they are computed."""
    num_slots_below: int = 0
    resident_below: frozenset[ExpertKey] | None = None
    """Experts that live in main memory, others on disk; None if nothing comes from disk there."""
    num_chunks: int = 1
    """Parts of an expert that are moved one by one."""
    cache_sizes: Mapping[int, int] = field(default_factory=dict)
    """Slots by layer for experts that stay after they have been computed."""
    cache_rule: Rule = "lifo"
    """Which of them leaves for another one."""


def simulate(name: str, setup: Setup, room: Room, world: World, *, num_passes: int) -> Timeline:
    """Runs the schedule of that name for `num_passes` passes.

    Raises AssertionError if it cannot go on: no lane has anything to do that could start.
    """
    simulator = Simulator(find_schedule(name)(setup), setup, room, world)
    return simulator.run(num_passes)


@dataclass(slots=True)
class _Lane:
    """Tasks in the order of their launch, and what runs now."""

    name: str
    waiting: deque[Task] = field(default_factory=deque)
    is_busy: bool = False
    num_pending: int = 0
    """Launched tasks that have not ended."""
    free_s: float = 0.0


class Simulator(Lanes):
    """Lanes with a virtual clock; a launcher that takes no time."""

    def __init__(self, schedule: Schedule, setup: Setup, room: Room, world: World) -> None:
        self._setup = setup
        self._world = world
        self._lanes: dict[str, _Lane] = {}
        self._now_s = 0.0
        self._ends: list[tuple[float, int, _Lane, Task]] = []
        self._counter = 0
        self._pending: dict[Task, float] = {}
        """Launched tasks that have not ended, with when that was."""
        self._ended_s: dict[Task, float] = {}
        self._last_reason: str | None = None
        self._spans: list[Span] = []
        self._chunks: dict[Task, tuple[Chunk, ChunkStream]] = {}
        cache = make_cache(room.cache_sizes, room.cache_rule)
        self._slots = _slot_queue(setup, room.num_chunks, room.num_slots, room.resident, cache)
        self.foresight = Foresight()
        self._below: SlotQueue | None = None
        if room.resident_below is not None:
            self._below = _slot_queue(
                setup, room.num_chunks, room.num_slots_below, room.resident_below
            )
        self._driver = Driver(
            schedule,
            setup,
            lanes=self,
            router=world,
            slots=self._slots,
            below=self._below,
            foresight=self.foresight,
        )
        self._add_streams()

    def run(self, num_passes: int) -> Timeline:
        """The timeline of the first `num_passes` passes."""
        self._driver.start()
        ends = []
        for number in range(num_passes):
            self._driver.run_pass(self._world.begin_pass(number))
            ends.append(self._now_s)
        self._driver.close()
        return Timeline(
            num_layers=self._setup.num_layers,
            pass_ends_s=tuple(ends),
            spans=tuple(sorted(self._spans, key=lambda span: span.start_s)),
        )

    # --- lanes, as the driver sees them ---------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()  # there is one thread

    def launch(self, task: Task) -> None:
        assert task not in self._pending, f"{task} is launched twice"
        for other in task.after:
            launched = other in self._pending or other in self._ended_s
            assert launched, f"{task} waits for {other}, which has not been launched"
        lane = self._lane(lane_of(task, self._setup.compute))
        self._pending[task] = self._now_s
        lane.num_pending += 1
        self._ended_s.pop(task, None)
        lane.waiting.append(task)
        self._start(lane)

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        while not condition():
            assert self._ends, f"nothing moves any more; waiting for {reason}"
            self._pass_time()

    def slots_changed(self) -> None:
        for lane in self._lanes.values():
            self._start(lane)

    def has_ended(self, task: Task) -> bool:
        return task in self._ended_s

    def is_idle(self, *, results_only: bool) -> bool:
        lanes = RESULT_LANES if results_only else self._lanes
        return not any(self._lane(name).num_pending for name in lanes)

    # --- time -----------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        """Up to the next end of a task."""
        self._now_s, _, lane, task = heappop(self._ends)
        lane.is_busy, lane.free_s = False, self._now_s
        self._last_reason = str(task)
        chunk = self._chunks.pop(task, None)
        if chunk is not None:
            moved, stream = chunk
            stream.moved(moved)
        else:
            del self._pending[task]
            lane.num_pending -= 1
            self._ended_s[task] = self._now_s
            self._driver.task_ended(task)
        self.slots_changed()

    def _start(self, lane: _Lane) -> None:
        """The next task of an idle lane, or a chunk where that one cannot start yet."""
        if lane.is_busy:
            return
        stream = self._streams.get(lane.name)
        next_chunk = _no_chunk if stream is None else stream.next_chunk
        found = take_next(lane.waiting, self._can_start, next_chunk)
        if isinstance(found, Task):
            self._begin(lane, found, self._driver.slot_of(found), self._reason(lane, found))
        elif found is not None and stream is not None:
            task = stream.task_of(found)
            self._chunks[task] = (found, stream)
            self._begin(lane, task, found.slot, "a free slot")

    def _can_start(self, task: Task) -> bool:
        return all(other in self._ended_s for other in task.after)

    def _begin(self, lane: _Lane, task: Task, slot: int | None, reason: str) -> None:
        end_s = self._now_s + self._world.seconds(task)
        waited = reason if self._now_s > lane.free_s else None
        self._spans.append(Span(task, lane.name, self._now_s, end_s, slot, waited))
        lane.is_busy = True
        self._counter += 1
        heappush(self._ends, (end_s, self._counter, lane, task))

    def _reason(self, lane: _Lane, task: Task) -> str:
        """What kept a task from beginning earlier."""
        last = max(task.after, key=lambda other: self._ended_s[other], default=None)
        if last is not None and self._ended_s[last] >= self._pending[task]:
            return str(last)
        return self._last_reason or "launch"

    # --- experts --------------------------------------------------------------------------------

    def _add_streams(self) -> None:
        driver = self._driver
        top = ChunkStream(slots=self._slots, step_of=driver.step_of, path=lambda: driver.disk_path)
        self._streams = {"dram->vram" if self._setup.compute == "vram" else "disk->dram": top}
        if self._below is not None:
            self._streams["disk->dram"] = ChunkStream(
                slots=self._below, kind=Kind.FETCH, step_of=driver.step_of
            )
        for name in self._streams:
            self._lane(name)

    def _lane(self, name: str) -> _Lane:
        return self._lanes.setdefault(name, _Lane(name))


def _slot_queue(
    setup: Setup,
    num_chunks: int,
    num_slots: int,
    resident: frozenset[ExpertKey],
    cache: Cache | None = None,
) -> SlotQueue:
    keys = (
        ExpertKey(layer, expert)
        for layer in sorted(setup.moe_layers)
        for expert in range(setup.num_experts)
    )
    queue = SlotQueue(
        dict.fromkeys(keys, num_chunks), num_slots=num_slots, resident=resident, cache=cache
    )
    queue.fill_residents()
    return queue


def _no_chunk() -> None:
    """Nothing but tasks goes over most lanes."""
