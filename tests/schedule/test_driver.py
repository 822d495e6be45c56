"""The order in which a driver launches, learns and looks ahead."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import pytest

from moebatch.schedule.definition import NamedSchedule, Traits, job_schedule
from moebatch.schedule.drivers.driver import Driver
from moebatch.schedule.drivers.simulate import Room, simulate
from moebatch.schedule.lanes import LANES
from moebatch.schedule.registry import SCHEDULES
from moebatch.schedule.request import Arrivals, InOrder, NextPass, Prefetch, Route, Schedule, Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.steps.kv import KvTraffic
from moebatch.schedule.task import Kind, Task, expert, gate
from tests.schedule.worlds import TableWorld

SETUP = Setup(
    num_layers=2,
    num_experts=3,
    moe_layers=frozenset({0, 1}),
    num_hot=1,
    lanes=LANES,
    compute="vram",
)
CHOSEN = (0, 2)
THERE, NOT_THERE = CHOSEN


class Slots(SlotQueue):
    """Slots that count at how many experts somebody looked, one by one."""

    num_looks = 0

    def is_ready(self, key: ExpertKey) -> bool:
        self.num_looks += 1
        return super().is_ready(key)

    def ready(self, keys: Collection[ExpertKey]) -> list[ExpertKey]:
        self.num_looks += len(keys)
        return super().ready(keys)


class Instant:
    """Lanes on which everything is done when it is launched, and experts come when they are waited
    for; and gates that always choose alike."""

    def __init__(self, name: str, setup: Setup) -> None:
        experts = range(setup.num_experts)
        keys = [ExpertKey(layer, expert) for layer in range(2) for expert in experts]
        resident = [key for key in keys if key.expert == THERE]
        self.slots = Slots(dict.fromkeys(keys, 1), num_slots=2, resident=resident)
        self.slots.fill_residents()
        self.events: list[str] = []
        self.driver = Driver(
            SCHEDULES[name](setup),
            setup,
            lanes=self,
            router=self,
            slots=self.slots,
            learn=lambda step, micro_batch: self.events.append(f"learn({step}, k{micro_batch})"),
        )

    @property
    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def launch(self, task: Task) -> None:
        if task.kind in (Kind.EXPERT, Kind.GATE, Kind.COMBINE):
            self.events.append(str(task))
        self.driver.task_ended(task)

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        while not condition():
            chunk = self.slots.next_chunk()
            assert chunk is not None, reason
            self.slots.finish_chunk(chunk)

    def slots_changed(self) -> None: ...

    def has_ended(self, task: Task) -> bool:
        return True

    def is_idle(self, *, results_only: bool) -> bool:
        return True

    def chosen(self, step: int, micro_batch: int) -> tuple[int, ...]:
        return CHOSEN

    def selected(self, step: int, micro_batch: int, later: int) -> tuple[int, ...]:
        return ()

    def ranked(self, step: int) -> tuple[int, ...]:
        self.events.append(f"rank({step})")
        return (1, 2, 0)

    def chances(self, layer: int) -> tuple[float, ...]:
        raise AssertionError("nobody goes by chance")


def first_step(name: str, setup: Setup) -> list[str]:
    """What happens from the first gate to the end of its step."""
    lanes = Instant(name, setup)
    lanes.driver.start()
    lanes.driver.run_pass(Sweep(num_micro_batches=1))
    events = lanes.events
    return events[events.index("gate(0, k0)") : events.index("combine(0)")]


@pytest.mark.parametrize("name", ["klotski", "promoe"])
def test_a_gpu_gets_what_is_ready_before_anything_is_learnt_or_foreseen(name: str) -> None:
    assert first_step(name, SETUP) == [
        "gate(0, k0)",
        f"expert(0, e{THERE})",
        "learn(0, k0)",
        "rank(1)",
        f"expert(0, e{NOT_THERE})",
    ]


class Chosen(Instant):
    """Gates that choose all experts."""

    def chosen(self, step: int, micro_batch: int) -> tuple[int, ...]:
        return tuple(range(self.num_experts))

    def __init__(self, name: str, setup: Setup) -> None:
        self.num_experts = setup.num_experts
        super().__init__(name, setup)


@pytest.mark.parametrize("name", ["klotski", "promoe", "pregated", "ondemand"])
def test_experts_that_arrive_one_by_one_are_looked_at_a_few_times_each(name: str) -> None:
    num_looks = []
    for num_experts in (50, 100):
        lanes = Chosen(name, replace(SETUP, num_experts=num_experts))
        lanes.driver.start()
        lanes.driver.run_pass(Sweep(num_micro_batches=1))
        num_looks.append(lanes.slots.num_looks)
    assert num_looks[1] < 2.5 * num_looks[0]


@pytest.mark.parametrize("name", ["klotski", "promoe"])
def test_where_launching_is_computing_what_is_foreseen_is_asked_for_first(name: str) -> None:
    assert first_step(name, replace(SETUP, compute="dram")) == [
        "gate(0, k0)",
        "learn(0, k0)",
        "rank(1)",
        f"expert(0, e{THERE})",
        f"expert(0, e{NOT_THERE})",
    ]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_whatever_a_gate_has_said_is_learnt_before_its_step_is_over(name: str) -> None:
    lanes = Instant(name, SETUP)
    lanes.driver.start()
    for _ in range(2):
        lanes.driver.run_pass(Sweep(num_micro_batches=2))
    learnt = [event for event in lanes.events if event.startswith("learn")]
    gates = [event for event in lanes.events if event.startswith("gate")]
    assert [event.replace("learn", "gate") for event in learnt] == gates
    for place, event in enumerate(lanes.events):
        if event.startswith("learn"):
            step = event.removeprefix("learn(").partition(",")[0]
            assert f"combine({step})" in lanes.events[place:]


@pytest.mark.parametrize("name", ["klotski", "hot", "promoe", "promoe_prefetch"])
def test_what_tokens_say_of_the_first_layers_is_asked_when_their_pass_begins(name: str) -> None:
    setup = Setup(num_layers=3, num_experts=4, moe_layers=frozenset(range(3)), num_hot=2, depth=2)
    schedule = SCHEDULES[name](setup)
    while not isinstance(next(schedule), NextPass):
        pass
    asked = [schedule.send(Sweep(num_micro_batches=1)), next(schedule)]
    assert asked == [Prefetch(0, 2), Prefetch(1, 2)]


@dataclass
class Asked(TableWorld):
    """A world that remembers of which layers it was asked for chances, and when."""

    asked: list[int | str] = field(default_factory=list)

    def begin_pass(self, number: int) -> Sweep:
        self.asked.append("pass")
        return super().begin_pass(number)

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        self.asked.append("gate")
        return super().chosen(step, micro_batch)

    def chances(self, layer: int) -> Sequence[float]:
        self.asked.append(layer)
        return super().chances(layer)


def test_a_cache_that_goes_by_chances_hears_of_all_layers_and_of_each_whose_gate_has_chosen() -> (
    None
):
    world = Asked(
        seconds_of={}, sweeps=[Sweep(num_micro_batches=1)] * 2, choices={(0, 0): [1], (1, 0): [2]}
    )
    room = Room(num_slots=1, cache_sizes={0: 1, 1: 1}, cache_rule="foreseen")
    setup = replace(SETUP, num_experts=4)
    simulate("klotski", setup, room, world, num_passes=2)
    second = world.asked[len(world.asked) - world.asked[::-1].index("pass") :]
    assert second[:2] == [0, 1]  # before anything is computed
    first, last = [place for place, what in enumerate(second) if what == "gate"]
    assert 0 in second[first:last] and 1 in second[last:]


@job_schedule(Traits())
def unasked(setup: Setup) -> Schedule:
    """Asks for what gates have chosen before they have been asked."""
    yield NextPass()
    yield Arrivals(0)


@job_schedule(Traits())
def unasked_in_order(setup: Setup) -> Schedule:
    """The same, one of them having been asked."""
    yield NextPass()
    yield gate(0, 0)
    yield Route(0, 0)
    yield from (expert(0, e, 1) for e in (yield InOrder(0, 1)))


@job_schedule(Traits())
def unstored(setup: Setup) -> Schedule:
    """Brings up keys and values that the micro-batch before has not stored."""
    sweep = yield NextPass()
    yield from KvTraffic(setup).up(sweep, 0, 1)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (unasked, "gate of step 0 has not been asked for any micro-batch; yield `Route` before"),
        (
            unasked_in_order,
            "gate of step 0 has not been asked for micro-batch 1; yield `Route` before",
        ),
        (unstored, "micro-batch 1 of step 0 continues 0, .*; launch `down` of that one before"),
    ],
)
def test_a_schedule_that_asks_too_early_is_told_what_comes_before(
    written: NamedSchedule, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULES, written.name, written)
    lanes = Instant(written.name, SETUP)
    lanes.driver.start()
    with pytest.raises(AssertionError, match=message):
        lanes.driver.run_pass(Sweep(num_micro_batches=2, continuing=frozenset({1})))
