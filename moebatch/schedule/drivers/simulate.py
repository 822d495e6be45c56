"""The simulator: a schedule on lanes with a virtual clock."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from moebatch.schedule.drivers.driver import Driver, Lanes, Router
from moebatch.schedule.drivers.foresight import Foresight
from moebatch.schedule.lanes import Lane, lane_of, rows_of, take_next
from moebatch.schedule.registry import find_schedule
from moebatch.schedule.request import CannotGoOn, Schedule, Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.cache import Cache, Rule, make_cache
from moebatch.schedule.slots.expert_load import Chunk, ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.slots.transfer import ChunkStream
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.timeline import (
    FREE_SLOT,
    LAUNCH,
    Launch,
    Span,
    Timeline,
    last_awaited,
)


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
    reading: Kind | None = None
    """Tasks of which kind read experts of their page from disk beside what else they do."""


def simulate(name: str, setup: Setup, room: Room, world: World, *, num_passes: int) -> Timeline:
    """Runs the schedule of that name for `num_passes` passes.

    Raises AssertionError if it cannot go on: no lane has anything to do that could start.
    """
    simulator = Simulator(find_schedule(name)(setup), setup, room, world)
    return simulator.run(num_passes)


@dataclass(slots=True, eq=False)
class _Running:
    """A task, or a chunk under the name of one, on its lane."""

    task: Task
    waited_for: str | None
    """None where its row has just ended something else."""
    slots: tuple[int, ...] = ()
    chunk: Chunk | None = None
    launch: Launch | None = None
    """None of a chunk, and of what another task reads."""
    reading: "_Running | None" = None
    """What it reads meanwhile, before whose end it does not end."""
    row: str = ""
    number: int = 0
    """In the order in which they began, which decides between equal ends."""
    start_s: float = 0.0
    left_s: float = 0.0
    """What it would still take alone, at `since_s`."""
    since_s: float = 0.0
    end_s: float = 0.0

    @property
    def over_s(self) -> float:
        """When it ends, if nothing else begins or ends before."""
        return self.end_s if self.reading is None else max(self.end_s, self.reading.end_s)

    @property
    def span(self) -> Span:
        return Span(
            self.task,
            self.row,
            self.start_s,
            self.end_s,
            self.slots,
            self.waited_for,
            self.launch,
        )


class _Device:
    """What runs now on all lanes of one device, which share its rate evenly."""

    def __init__(self) -> None:
        self._running: list[_Running] = []

    @property
    def serves_task(self) -> bool:
        return any(one.launch is not None for one in self._running)

    def begin(self, one: _Running) -> None:
        self._share(one.start_s, [*self._running, one])

    def end(self, one: _Running) -> None:
        self._share(one.end_s, [other for other in self._running if other is not one])

    def _share(self, now_s: float, running: list[_Running]) -> None:
        """From now on these run, which changes when each of them ends."""
        for one in self._running:
            one.left_s -= (now_s - one.since_s) / len(self._running)
        self._running = running
        for one in running:
            one.since_s, one.end_s = now_s, now_s + one.left_s * len(running)


class _Lane:
    """Tasks in the order of their launch, and what runs now."""

    def __init__(self, lane: Lane, device: _Device) -> None:
        self.is_result = lane.has_result
        self.waiting = deque[Task]()
        self.running: list[_Running] = []
        """As many as the lane is wide."""
        self.num_pending = 0
        """Launched tasks that have not ended."""
        self.free_s = dict.fromkeys(rows_of(lane), 0.0)
        """When each row ended what it did last."""
        self.stream: ChunkStream | None = None
        self.device = device

    @property
    def is_full(self) -> bool:
        return len(self.running) == len(self.free_s)

    def can_begin_task(self) -> bool:
        """Launched tasks run one after the other."""
        return not any(one.launch is not None for one in self.running)

    def next_chunk(self) -> Chunk | None:
        return self.stream.next_chunk() if self.stream else None

    def begin(self, one: _Running) -> None:
        """On a row that is free."""
        taken = {other.row for other in self.running}
        one.row = next(row for row in self.free_s if row not in taken)
        if one.start_s <= self.free_s[one.row]:
            one.waited_for = None
        self.running.append(one)
        self.device.begin(one)

    def end(self, one: _Running) -> None:
        self.running.remove(one)
        self.free_s[one.row] = one.end_s
        self.device.end(one)


class Simulator(Lanes):
    """Lanes with a virtual clock; a launcher that takes no time."""

    def __init__(self, schedule: Schedule, setup: Setup, room: Room, world: World) -> None:
        self._setup = setup
        self._world = world
        devices = defaultdict[str, _Device](_Device)
        self._lanes = {lane.name: _Lane(lane, devices[lane.device]) for lane in setup.lanes}
        self._now_s = 0.0
        self._pending: dict[Task, Launch] = {}
        """Launched tasks that have not ended."""
        self._ended_s: dict[Task, float] = {}
        self._last_reason = LAUNCH
        self._begun: list[_Running] = []
        self._reading = room.reading
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
        self._driver.start()
        ends = []
        for number in range(num_passes):
            self._driver.run_pass(self._world.begin_pass(number))
            ends.append(self._now_s)
        self._driver.close()
        return Timeline(
            num_layers=self._setup.num_layers,
            pass_ends_s=tuple(ends),
            spans=tuple(one.span for one in self._begun),
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
        lane = self._lanes[lane_of(task.kind, self._setup.compute).name]
        self._pending[task] = Launch(self._now_s, self._last_reason)
        lane.num_pending += 1
        self._ended_s.pop(task, None)
        lane.waiting.append(task)
        self._start(lane)

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        while not condition():
            running = [(one, lane) for lane in self._lanes.values() for one in lane.running]
            if not running:
                raise CannotGoOn(f"nothing moves any more; waiting for {reason}")
            self._end(*min(running, key=lambda pair: (pair[0].over_s, pair[0].number)))

    def slots_changed(self) -> None:
        for lane in self._lanes.values():
            self._start(lane)

    def has_ended(self, task: Task) -> bool:
        return task in self._ended_s

    def is_idle(self, *, results_only: bool) -> bool:
        lanes = self._lanes.values()
        return not any(lane.num_pending for lane in lanes if lane.is_result or not results_only)

    # --- time -----------------------------------------------------------------------------------

    def _end(self, one: _Running, lane: _Lane) -> None:
        """Time passes up to the end of a task."""
        self._now_s = one.end_s = one.over_s
        self._last_reason = str(one.task)
        lane.end(one)
        if one.chunk is not None:
            assert lane.stream is not None, "chunks come from a stream"
            lane.stream.moved(one.chunk)
        elif one.launch is not None:
            del self._pending[one.task]
            lane.num_pending -= 1
            self._ended_s[one.task] = self._now_s
            self._driver.task_ended(one.task)
        self.slots_changed()

    def _start(self, lane: _Lane) -> None:
        """As much as the lane has room for: the next task, or a chunk where that one cannot start
        yet."""
        while (lane.waiting or lane.stream) and not lane.is_full:
            found = take_next(
                lane.waiting,
                lambda task: lane.can_begin_task() and self._can_start(task),
                lane.next_chunk,
                serves_task=lane.device.serves_task,
            )
            if found is None:
                return
            self._run(lane, self._taken(lane, found))

    def _can_start(self, task: Task) -> bool:
        return all(other in self._ended_s for other in task.after)

    def _taken(self, lane: _Lane, found: Task | Chunk) -> _Running:
        if isinstance(found, Task):
            launch = self._pending[found]
            return _Running(
                found,
                last_awaited(found, self._ended_s, launch),
                self._driver.slots_of(found),
                launch=launch,
                reading=self._read_beside(found) if found.kind is self._reading else None,
            )
        assert lane.stream is not None, "chunks come from a stream"
        return _Running(lane.stream.task_of(found), FREE_SLOT, (found.slot,), chunk=found)

    def _read_beside(self, task: Task) -> _Running:
        """Experts of a page that live on disk come through main memory."""
        fetch = Task(Kind.FETCH, task.step, page=task.page or 0, num_pages=task.num_pages)
        lane = self._lanes[lane_of(fetch.kind, self._setup.compute).name]
        assert not lane.is_full, "a disk is read for one page at a time"
        return self._run(lane, _Running(fetch, str(task)))

    def _run(self, lane: _Lane, one: _Running) -> _Running:
        one.number, one.start_s = len(self._begun), self._now_s
        one.left_s = self._world.seconds(one.task)
        self._begun.append(one)
        lane.begin(one)
        return one

    # --- experts --------------------------------------------------------------------------------

    def _add_streams(self) -> None:
        driver, slots = self._driver, self._slots
        top = ChunkStream(slots=slots, step_of=driver.step_of, path=lambda: driver.disk_path)
        self._add_stream(top)
        if self._below is not None:
            self._add_stream(
                ChunkStream(slots=self._below, kind=Kind.FETCH, step_of=driver.step_of)
            )

    def _add_stream(self, stream: ChunkStream) -> None:
        self._lanes[lane_of(stream.kind, self._setup.compute).name].stream = stream


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
