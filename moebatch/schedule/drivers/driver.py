"""Drives a schedule: launches its tasks and answers what it asks, on any kind of lanes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, Protocol

from moebatch.schedule.drivers.foresight import Foresight
from moebatch.schedule.drivers.layer_weights import LayerWeights
from moebatch.schedule.request import (
    Arrivals,
    Arriving,
    CancelPrefetch,
    CannotGoOn,
    Free,
    GateChosen,
    InOrder,
    NextPass,
    Prefetch,
    PrefetchToDram,
    Request,
    Route,
    Schedule,
    Select,
    Sweep,
    Sync,
    Whole,
)
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.schedule.slots.transfer import DiskPath, ThroughMemory
from moebatch.schedule.task import Kind, Task, gate


class Lanes(Protocol):
    """Lanes that take tasks, with a virtual clock or real ones. They call `Driver.task_ended`."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while slots are looked at or changed; `wait` gives it up meanwhile."""

    def launch(self, task: Task) -> None:
        """Takes a task for its lane, behind those launched before it."""

    def wait(self, condition: Callable[[], bool], reason: str) -> None:
        """Returns when `condition` holds, which is looked at with the lock held."""

    def slots_changed(self) -> None:
        """There may be something else to move now. Called with the lock held."""

    def has_ended(self, task: Task) -> bool:
        """Whether a launched task is done. Called with the lock held."""

    def is_idle(self, *, results_only: bool) -> bool:
        """Whether all launched tasks are done, or those that compute or store something. Called
        with the lock held."""


class Router(Protocol):
    """What gates say, and what is likely before they do."""

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        """Experts that at least one token of the micro-batch chose, once its gate has chosen."""

    def selected(self, step: int, micro_batch: int, later: int) -> Sequence[int]:
        """Experts that the pre-gate of a step has chosen for a later one, once it has chosen for
        the micro-batch."""

    def ranked(self, step: int) -> Sequence[int]:
        """Experts of the step's layer worth having beforehand, the likeliest first."""

    def chances(self, layer: int) -> Sequence[float]:
        """With what chance each expert of a layer is chosen when its turn comes, [E]."""


class Driver:
    """Answers a schedule's requests with what slots, gates and lanes say."""

    def __init__(
        self,
        schedule: Schedule,
        setup: Setup,
        *,
        lanes: Lanes,
        router: Router,
        slots: SlotQueue,
        below: SlotQueue | None = None,
        foresight: Foresight | None = None,
        learn: Callable[[int, int], None] = lambda step, micro_batch: None,
    ) -> None:
        """`slots` are those of the level that computes; `below` are those of main memory under it,
        through which experts come that live on disk. `foresight` counts how well they are foreseen.
        `learn` is called with a step and a micro-batch whose gate has chosen, when what it asks for
        is on its way and what is ready has been launched: guesses take time."""
        self._schedule = schedule
        self._setup = setup
        self._experts = [
            [ExpertKey(layer, expert) for expert in range(setup.num_experts)]
            for layer in range(setup.num_layers)
        ]
        self._lanes = lanes
        self._router = router
        self._slots = slots
        self.disk_path = DiskPath() if below is None else ThroughMemory(below, slots)
        self._foresight = foresight or Foresight()
        self._layer_weights = LayerWeights(setup)
        self._learn = learn
        self._to_learn: list[tuple[int, int]] = []
        """Steps and micro-batches whose gates have chosen."""
        self._steps: dict[int, int] = {}
        self._chosen: dict[int, dict[int, tuple[int, ...]]] = {}
        """Experts by step and micro-batch."""
        self._wanted: dict[int, set[int]] = {}
        """The same of all micro-batches of a step together."""
        self._required: dict[int, set[int]] = {}
        """Those that have been asked for, by step."""

    def start(self) -> None:
        """Goes up to the first pass: what is prefetched then comes while it is made up."""
        self._advance(None)

    def run_pass(self, sweep: Sweep) -> None:
        """Goes through one pass; all of it has been computed when this returns."""
        for layer in sorted(self._setup.moe_layers):
            self._expect(layer)
        self._advance(sweep)

    def close(self) -> None:
        """Ends the schedule."""
        self._schedule.close()

    def task_ended(self, task: Task) -> None:
        """A task is done: its expert may leave. Called by the lanes, with the lock held; they look
        for what else can be moved after it."""
        if task.kind is Kind.EXPERT:
            for key in self._keys(task):
                self._slots.finish(key, keep=self._is_kept(task, key))

    def step_of(self, layer: int) -> int:
        """The step for which experts of a layer are moved now."""
        return self._steps.get(layer, layer)

    def slots_of(self, task: Task) -> tuple[int, ...]:
        """Where the experts lie that a task computes; nowhere for others. With the lock held."""
        if task.kind is not Kind.EXPERT:
            return ()
        slots = map(self._slots.slot_of, self._keys(task))
        return tuple(slot for slot in slots if slot is not None)

    # --- requests -------------------------------------------------------------------------------

    def _advance(self, answer: Any) -> None:
        """Up to the next request for a pass, when all before it has been computed."""
        while True:
            item = self._schedule.send(answer)
            if not _is_urgent(item):
                self._learn_now()
            if isinstance(item, Task):
                self._launch(item)
                answer = None
            elif isinstance(item, NextPass):
                self._lanes.wait(lambda: self._lanes.is_idle(results_only=True), "end of pass")
                self._chosen.clear()
                self._wanted.clear()
                self._required.clear()
                self._foresight.end_pass()
                return
            else:
                answer = _ANSWERS[type(item)](self, item)

    def _launch(self, task: Task) -> None:
        if task.kind is Kind.EXPERT:
            with self._lanes.lock:
                for key in self._keys(task):
                    if not self._slots.is_ready(key):
                        self._schedule.throw(
                            CannotGoOn(f"{task}: expert {key.expert} is not there")
                        )
                    # Once over all micro-batches, or over one of them.
                    self._slots.use(key, is_last=task.micro_batch is None)
        try:
            tasks = [*self._layer_weights.before(task)]
        except CannotGoOn as error:
            self._schedule.throw(error)
            raise
        for each in tasks:
            self._lanes.launch(each)

    def _prefetch(self, request: Prefetch) -> None:
        step, count = request.step, request.count
        if count is None:
            self._bring(step, range(self._setup.num_experts))
        else:
            self._expect(self._setup.layer(step))
            self._foresee(step, self._router.ranked(step)[:count])

    def _select(self, request: Select) -> None:
        step, later = request.step, self._setup.selected_by(request.step)
        if later is not None:
            assert step in self._chosen, _unasked(step)
            batches = (self._router.selected(step, k, later) for k in self._chosen[step])
            self._foresee(later, sorted(set(chain.from_iterable(batches))))

    def _foresee(self, step: int, experts: Sequence[int]) -> None:
        self._foresight.foresee(step, self._setup.layer(step), experts)
        self._bring(step, experts)

    def _bring(self, step: int, experts: Collection[int]) -> None:
        """These, and not what was said of the step before, from further away."""
        layer = self._begin(step)
        keys = self._of(layer, experts)
        with self._lanes.lock:
            self._slots.withdraw(layer, keep=experts)
            self._slots.prefetch(keys)
            self.disk_path.prefetch(keys)
            self._lanes.slots_changed()

    def _prefetch_to_dram(self, request: PrefetchToDram) -> None:
        layer = self._begin(request.step)
        with self._lanes.lock:
            self.disk_path.fetch(self._experts[layer])
            self._lanes.slots_changed()

    def _route(self, request: Route) -> tuple[int, ...]:
        chosen = self._gate_chosen(request)
        required = self._required.setdefault(request.step, set())
        news = sorted(set(chosen) - required)
        required.update(news)
        layer = self._setup.layer(request.step)
        with self._lanes.lock:
            for key in self._of(layer, news):
                self._require(key)
            self._lanes.slots_changed()
        return chosen

    def _gate_chosen(self, request: GateChosen | Route) -> tuple[int, ...]:
        """Waits for a gate, and returns what it has chosen."""
        step, micro_batch = request.step, request.micro_batch
        known = self._chosen.get(step, {}).get(micro_batch)
        if known is not None:
            return known
        task = gate(step, micro_batch)
        self._lanes.wait(lambda: self._lanes.has_ended(task), str(task))
        chosen = tuple(self._router.chosen(step, micro_batch))
        self._chosen.setdefault(step, {})[micro_batch] = chosen
        wanted = self._wanted.setdefault(step, set())
        news = sorted(set(chosen) - wanted)
        wanted.update(chosen)
        self._to_learn.append((step, micro_batch))
        layer = self._begin(step)
        keys = self._experts[layer]
        with self._lanes.lock:
            self._foresight.ask(step, layer, news, lambda expert: self._slots.state(keys[expert]))
        return chosen

    def _learn_now(self) -> None:
        while self._to_learn:
            step, micro_batch = self._to_learn.pop(0)
            self._learn(step, micro_batch)
            self._expect(self._setup.layer(step))

    def _expect(self, layer: int) -> None:
        """Says how likely experts of a layer are, where that decides who stays."""
        if self._slots.cache.asks_for_chances:
            chances_E = self._router.chances(layer)
            with self._lanes.lock:
                self._slots.cache.expect(layer, chances_E)

    def _require(self, key: ExpertKey) -> None:
        self._slots.require(key)
        self.disk_path.require(key)

    def _cancel_prefetch(self, request: CancelPrefetch) -> None:
        with self._lanes.lock:
            self._slots.withdraw(self._setup.layer(request.step))
            self._lanes.slots_changed()

    def _free(self, request: Free) -> None:
        with self._lanes.lock:
            self._slots.release(self._setup.layer(request.step))
            self._lanes.slots_changed()

    def _sync(self, request: Sync) -> None:
        self._lanes.wait(lambda: self._lanes.is_idle(results_only=False), "everything")

    def _whole(self, request: Whole) -> None:
        """Gates have to choose before anything else can go on, so they may as well end first."""
        step = request.step
        self._lanes.wait(lambda: self._lanes.is_idle(results_only=True), f"gates of step {step}")
        layer = self._begin(step)
        for key in self._experts[layer]:
            with self._lanes.lock:
                self._slots.prefetch([key])
                self.disk_path.hurry([key])
                self._lanes.slots_changed()
            self._lanes.wait(partial(self._is_there, key), f"expert {key.expert} of step {step}")

    def _is_there(self, key: ExpertKey) -> bool:
        """Whether waiting for an expert makes no sense any more."""
        return not self._slots.is_missing(key) or self._slots.is_settled(key.layer)

    def _arrivals(self, request: Arrivals) -> Arriving:
        step, layer = request.step, self._setup.layer(request.step)
        assert step in self._wanted, _unasked(step)
        keys = self._of(layer, sorted(self._wanted[step]))

        num_seen = 0

        def ready(waiting: Collection[ExpertKey], of_all: bool) -> list[ExpertKey]:
            nonlocal num_seen
            with self._lanes.lock:
                come = waiting if of_all else new(waiting)
                num_seen = self._slots.num_arrived
                return self._slots.ready(come)

        def new(waiting: Collection[ExpertKey]) -> list[ExpertKey]:
            return [key for key in self._slots.arrived_after(num_seen) if key in waiting]

        def has_come(waiting: Collection[ExpertKey]) -> bool:
            return any(map(self._slots.is_ready, new(waiting)))

        def wait(waiting: Collection[ExpertKey]) -> None:
            self._learn_now()
            with self._lanes.lock:
                self.disk_path.hurry(waiting)
                self._lanes.slots_changed()
            one = _some_of(step, waiting)
            self._lanes.wait(lambda: has_come(waiting) or self._slots.are_held, one)
            with self._lanes.lock:
                if not has_come(waiting):
                    raise CannotGoOn(
                        f"{one} never comes: all slots hold experts that have been handed out and "
                        "are not launched"
                    )

        return Arriving(keys, ready, wait, most_together=self._setup.most_together)

    def _in_order(self, request: InOrder) -> Iterator[int]:
        step, micro_batch = request.step, request.micro_batch
        layer = self._setup.layer(step)
        chosen = self._chosen.get(step, {}).get(micro_batch)
        assert chosen is not None, _unasked(step, f"micro-batch {micro_batch}")
        for key in self._of(layer, sorted(chosen)):
            with self._lanes.lock:
                self._require(key)  # it keeps its slot until its launch
                self._slots.hurry(key)
                self.disk_path.hurry([key])
                self._lanes.slots_changed()
            ready = partial(self._slots.is_ready, key)
            self._lanes.wait(ready, f"expert {key.expert} of step {step}")
            yield key.expert

    def _is_kept(self, task: Task, key: ExpertKey) -> bool:
        """Whether a later micro-batch of the step has chosen the same expert."""
        if task.micro_batch is None:
            return False
        chosen = self._chosen.get(task.step, {})
        return any(key.expert in chosen[k] for k in chosen if k > task.micro_batch)

    def _begin(self, step: int) -> int:
        """The layer of a step for which experts are moved from now on."""
        layer = self._setup.layer(step)
        self._steps[layer] = step
        return layer

    def _keys(self, task: Task) -> list[ExpertKey]:
        layer = self._setup.layer(task.step)
        return self._of(layer, task.experts)

    def _of(self, layer: int, experts: Iterable[int]) -> list[ExpertKey]:
        keys = self._experts[layer]
        return [keys[expert] for expert in experts]


_ANSWERS: Mapping[type[Request], Callable[[Driver, Any], Any]] = {
    Prefetch: Driver._prefetch,
    PrefetchToDram: Driver._prefetch_to_dram,
    Route: Driver._route,
    Select: Driver._select,
    GateChosen: Driver._gate_chosen,
    CancelPrefetch: Driver._cancel_prefetch,
    Whole: Driver._whole,
    Arrivals: Driver._arrivals,
    InOrder: Driver._in_order,
    Free: Driver._free,
    Sync: Driver._sync,
}


def _is_urgent(item: Task | Request) -> bool:
    """Whether it is part of getting experts under way that a gate has chosen."""
    if isinstance(item, Task):
        return item.kind is Kind.EXPERT
    return isinstance(item, CancelPrefetch | Arrivals)


def _unasked(step: int, micro_batch: str = "any micro-batch") -> str:
    return f"the gate of step {step} has not been asked for {micro_batch}; yield `Route` before"


def _some_of(step: int, keys: Collection[ExpertKey]) -> str:
    return f"one of {len(keys)} experts of step {step}"
