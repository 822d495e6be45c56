"""What a schedule of a user's own has to keep to, looked at while it yields: what it leaves out, or
launches too early, would be wrong tokens."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import SupportsIndex

from moebatch.quoting import shown
from moebatch.schedule.definition import Traits
from moebatch.schedule.request import (
    Arrivals,
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
    Whole,
)
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.kv_route import FROM_ATTENTION, TO_ATTENTION
from moebatch.schedule.task import Kind, Task

_BESIDE = (Kind.PRE, Kind.OFF, Kind.ATTN, Kind.LOAD, Kind.OUT)
"""Attention of a micro-batch on the CPU beside a GPU, in its order."""
_WEIGHTS = (Kind.PAGE, Kind.BLOCK)
_OF_SLOTS = (Kind.CHUNK, Kind.FETCH)
_OF_MICRO_BATCH = frozenset(Kind) - {
    *(Kind.EXPERT, Kind.COMBINE, Kind.DENSE, Kind.STAGE),
    *(*_WEIGHTS, *_OF_SLOTS),
}
_ASK_OF_EXPERTS = (Prefetch, PrefetchToDram, Select, Free, Whole, Arrivals, InOrder)
_MOST_BETWEEN = 10
"""What may come in a row for each layer and each of its experts and micro-batches, of which nothing
attends or computes experts: more than there are requests and transfers."""
_ALL_OF_LAYER = "each micro-batch needs its attention and gate once, its experts, and then combine"


class OutOfOrder(Exception):
    """What a schedule yielded cannot be done, or not yet."""


def checked(begun: Schedule, setup: Setup, traits: Traits) -> Schedule:
    """The same schedule. Raises OutOfOrder for what it must not yield, before a driver sees it."""
    watch, item, answer = _Watch(setup, traits), None, None
    while True:
        try:
            item = begun.send(answer)
        except StopIteration:
            if isinstance(item, NextPass) and answer is None:
                return
            raise OutOfOrder(
                "it ended before the job did; `while sweep := (yield NextPass())` goes through all "
                "passes"
            ) from None
        watch.look(item)
        answer = yield item
        watch.answer(item, answer)


@dataclass(slots=True)
class _Step:
    """A step of the pass in work."""

    attended: set[int] = field(default_factory=set)
    """Micro-batches, as all here are."""
    gated: set[int] = field(default_factory=set)
    chosen: dict[int, frozenset[int]] = field(default_factory=dict)
    """Experts, where a request has said so."""
    routed: set[int] = field(default_factory=set)
    computed: set[tuple[int, int | None]] = field(default_factory=set)
    """Experts with the micro-batch; None is all of them."""
    is_combined: bool = False


class _Watch:
    """What a schedule has yielded in the pass in work."""

    def __init__(self, setup: Setup, traits: Traits) -> None:
        self._setup = setup
        self._traits = traits
        self._sweep: Sweep | None = None
        self._first_step = 0
        """All before it are those of passes before."""
        self._first_layer = 0
        self._launched: set[Task] = set()
        self._with_weights: set[int] = set()
        """Steps for which pages or a block have been launched."""
        self._steps = defaultdict[int, _Step](_Step)
        self._through: set[tuple[int, int]] = set()
        """Layers with the micro-batches that have been through them."""
        self._num_idle = 0
        """Tasks and requests in a row of which none attends or computes experts."""

    def look(self, item: object) -> None:
        """Raises OutOfOrder if it cannot be done now; notes it otherwise."""
        self._num_idle += 1
        if isinstance(item, Task):
            self._look_at_task(item)
        elif isinstance(item, Request):
            self._look_at_request(item)
        else:
            raise OutOfOrder(f"yielded {shown(item)}, which is neither a task nor a request")
        if self._num_idle > self._most_idle:
            raise OutOfOrder(
                f"yielded {self._num_idle} tasks and requests in a row, of which none attends or "
                "computes experts; does its loop never end?"
            )

    @property
    def _most_idle(self) -> int:
        num_micro_batches = self._sweep.num_micro_batches if self._sweep else 0
        of_layer = num_micro_batches + self._setup.num_experts + 1
        return _MOST_BETWEEN * (self._setup.num_layers + 1) * of_layer

    def answer(self, item: Task | Request, answer: object) -> None:
        """Notes what the schedule is told."""
        match item, answer:
            case NextPass(), Sweep():
                self._begin(answer)
            case ((Route(step, k) | GateChosen(step, k)), tuple()):
                self._steps[step].chosen[k] = frozenset(answer)

    def _begin(self, sweep: Sweep) -> None:
        self._sweep, self._first_layer = sweep, self._setup.in_pass(sweep).num_skipped

    # --- requests -------------------------------------------------------------------------------

    def _look_at_request(self, request: Request) -> None:
        if isinstance(request, NextPass):
            self._end_pass()
            return
        step: int = getattr(request, "step", 0)
        if not isinstance(step, SupportsIndex) or step < 0:
            raise OutOfOrder(f"{_named(request)}: there is no step {shown(step)}")
        if isinstance(request, _ASK_OF_EXPERTS) and not self._setup.is_moe(step):
            raise OutOfOrder(f"{_named(request)}: the layer of step {step} has no experts")
        of_step = self._steps.get(step, _Step())
        match request:
            case Prefetch(_, count) if not (count is None or _is_count(count)):
                raise OutOfOrder(f"{_named(request)}: there cannot be {shown(count)} experts")
            case Route(_, k) | GateChosen(_, k) if k not in of_step.gated:
                raise OutOfOrder(f"{_named(request)} comes before gate({step}, k{k})")
            case InOrder(_, k) if k not in of_step.chosen:
                raise OutOfOrder(f"{_named(request)} comes before Route({step}, {k})")
            case Route(_, k):
                of_step.routed.add(k)
            case Select() if not of_step.chosen:
                raise OutOfOrder(f"{_named(request)} comes before any Route({step}, k)")
            case Arrivals() if not of_step.routed or of_step.routed < of_step.chosen.keys():
                raise OutOfOrder(f"{_named(request)} comes before Route({step}, k)")
            case Arrivals() if any(of is None for _, of in of_step.computed):
                raise OutOfOrder(f"{_named(request)}: experts of step {step} have run already")

    def _end_pass(self) -> None:
        """All micro-batches have been through all layers, or there was none."""
        if self._sweep is None:
            return
        for layer in range(self._first_layer, self._setup.num_layers):
            for k in self._sweep.micro_batches:
                if (layer, k) not in self._through:
                    raise OutOfOrder(
                        f"the pass ends, and micro-batch {k} has not been through layer {layer}; "
                        f"{_ALL_OF_LAYER}"
                    )
        for i, step in self._steps.items():
            for k in step.attended:
                self._has_launched(
                    f"the end of the pass: keys and values of ({i}, k{k})", i, k, FROM_ATTENTION
                )
        self._sweep, self._first_step = None, max(self._steps, default=-1) + 1
        self._launched = {task for task in self._launched if task.step >= self._first_step}
        self._with_weights = {step for step in self._with_weights if step >= self._first_step}
        self._steps.clear()
        self._through.clear()

    # --- tasks ----------------------------------------------------------------------------------

    def _look_at_task(self, task: Task) -> None:
        i, k = task.step, task.micro_batch
        if not isinstance(i, SupportsIndex) or i < self._first_step:
            raise OutOfOrder(
                f"{task} is not of this pass, whose steps begin with {self._first_step}; steps are "
                "counted on from pass to pass, as layer.step is"
            )
        if task.kind in _OF_MICRO_BATCH or k is not None:
            num = self._sweep.num_micro_batches if self._sweep else 0
            if not isinstance(k, SupportsIndex) or not 0 <= k < num:
                raise OutOfOrder(f"{task}: the pass has {num} micro-batches")
        if task in self._launched:
            raise OutOfOrder(f"{task} is launched twice")
        for other in task.after:
            if not isinstance(other, Task):
                raise OutOfOrder(f"{task} waits for {shown(other)}, which is no task")
            if other not in self._launched and other.step >= self._first_step:
                raise OutOfOrder(f"{task} waits for {other}, which has not been launched")
        if (look := _LOOK.get(task.kind)) is not None:
            look(self, task)
        self._launched.add(task)

    def _attention_begins(self, task: Task) -> None:
        """Of this micro-batch in this layer, for the first time."""
        assert self._sweep is not None, "a micro-batch of the pass"
        layer, k = self._setup.layer(task.step), task.k
        if layer > self._first_layer and (layer - 1, k) not in self._through:
            raise OutOfOrder(
                f"{task}: micro-batch {k} has not been through layer {layer - 1}; {_ALL_OF_LAYER}"
            )
        on_cpu = self._sweep.attends_on_cpu(k)
        if on_cpu != (task.kind is Kind.PRE):
            raise OutOfOrder(
                f"{task}: micro-batch {k} attends {'on the CPU' if on_cpu else 'where experts are'}"
                "; layer.attention() launches what that takes"
            )
        if task.kind is Kind.ATTEND:
            self._has_cache(task)
            self._has_attended(task)

    def _attention_goes_on(self, task: Task, kind: Kind | None = None) -> None:
        """What a task does, or does first, is a part of attention behind another one."""
        kind = kind or task.kind
        before = Task(_BESIDE[_BESIDE.index(kind) - 1], task.step, task.k)
        if before not in task.after:
            raise OutOfOrder(f"{task} has to wait for {before}")
        if kind is Kind.ATTN:
            self._has_cache(task)
        if kind is Kind.OUT:
            self._has_attended(task)

    def _has_attended(self, task: Task) -> None:
        layer, k = self._setup.layer(task.step), task.k
        others = [step for step in self._steps if self._setup.layer(step) == layer]
        if any(k in self._steps[step].attended for step in others):
            raise OutOfOrder(f"{task}: micro-batch {k} has attended in layer {layer} already")
        self._steps[task.step].attended.add(k)
        self._num_idle = 0

    def _has_cache(self, task: Task) -> None:
        """Keys and values are where attention is computed when it begins."""
        last = self._has_launched(str(task), task.step, task.k, TO_ATTENTION)
        if last is not None and last not in task.after:
            raise OutOfOrder(f"{task} has to wait for {last}")

    def _has_launched(self, what: str, i: int, k: int, kinds: Collection[Kind]) -> Task | None:
        """The last transfer of keys and values that there has to be."""
        assert self._sweep is not None, "a pass is in work"
        last = None
        for kind in self._setup.kv_kinds(self._sweep, i, k):
            if kind in kinds:
                last = Task(kind, i, k)
                if last not in self._launched:
                    raise OutOfOrder(
                        f"{what} comes before {last}; layer.attention() brings and stores them"
                    )
        return last

    def _gate(self, task: Task) -> None:
        step = self._steps[task.step]
        self._must_be_moe(task)
        if task.k not in step.attended:
            raise OutOfOrder(f"{task} comes before the attention of micro-batch {task.k}")
        if any(of is None for _, of in step.computed) or step.is_combined:
            raise OutOfOrder(f"{task} comes behind experts that ran for all micro-batches")
        step.gated.add(task.k)

    def _experts(self, task: Task) -> None:
        self._must_be_moe(task)
        step, k = self._steps[task.step], task.micro_batch
        chosen: Mapping[int, frozenset[int]] = (
            step.chosen if k is None else {k: step.chosen.get(k, frozenset())}
        )
        for e in task.experts:
            if not isinstance(e, SupportsIndex) or not any(e in of for of in chosen.values()):
                raise OutOfOrder(
                    f"{task}: expert {shown(e)} is none that gates have chosen and Route has asked "
                    "for"
                )
            if any(e == other and _clash(k, of) for other, of in step.computed):
                raise OutOfOrder(f"{task}: expert {e} has been launched already")
            step.computed.add((e, k))
            self._num_idle = 0

    def _combine(self, task: Task) -> None:
        i, step = task.step, self._steps[task.step]
        if not step.gated:
            raise OutOfOrder(f"{task} comes before any gate({i}, k)")
        for k in sorted(step.gated):
            if k not in step.chosen:
                raise OutOfOrder(f"{task} comes before Route({i}, {k})")
            left = {e for e in step.chosen[k] if not {(e, k), (e, None)} & step.computed}
            if left:
                raise OutOfOrder(
                    f"{task} comes before {len(left)} experts that micro-batch {k} has chosen, "
                    f"expert {min(left)} among them"
                )
        step.is_combined = True
        self._has_been_through(i, step.gated)

    def _post(self, task: Task) -> None:
        assert self._sweep is not None, "a micro-batch of the pass"
        i, k = task.step, task.k
        if self._setup.is_moe(i):
            if not self._traits.is_paged:
                raise OutOfOrder(f"{task} is for schedules that say moves='pages' or 'block'")
            if i not in self._with_weights:
                raise OutOfOrder(f"{task} comes before the weights of step {i}")
        if self._sweep.attends_on_cpu(k) and Task(Kind.OUT, i, k) not in self._launched:
            self._attention_goes_on(task, Kind.OUT)
        if k not in self._steps[i].attended:
            raise OutOfOrder(f"{task} comes before the attention of micro-batch {k}")
        self._has_been_through(i, [k])

    def _dense(self, task: Task) -> None:
        if self._setup.is_moe(task.step):
            raise OutOfOrder(f"{task}: the layer of step {task.step} has experts")
        self._has_been_through(task.step, self._steps[task.step].attended)

    def _weights(self, task: Task) -> None:
        wanted = "block" if task.kind is Kind.BLOCK else "pages"
        if self._traits.moves != wanted:
            raise OutOfOrder(f"{task} is for schedules that say moves={wanted!r}")
        self._with_weights.add(task.step)

    def _moves_by_itself(self, task: Task) -> None:
        raise OutOfOrder(f"{task}: experts move by themselves when they are asked for")

    def _has_been_through(self, i: int, micro_batches: Iterable[int]) -> None:
        self._through.update((self._setup.layer(i), k) for k in micro_batches)

    def _must_be_moe(self, task: Task) -> None:
        if not self._setup.is_moe(task.step):
            raise OutOfOrder(f"{task}: the layer of step {task.step} has no experts")
        if self._traits.is_paged:
            raise OutOfOrder(f"{task}: with moves={self._traits.moves!r} post does that")


_LOOK: Mapping[Kind, Callable[[_Watch, Task], None]] = {
    **dict.fromkeys((Kind.ATTEND, Kind.PRE), _Watch._attention_begins),
    **dict.fromkeys(_BESIDE[1:], _Watch._attention_goes_on),
    Kind.GATE: _Watch._gate,
    Kind.EXPERT: _Watch._experts,
    Kind.COMBINE: _Watch._combine,
    Kind.POST: _Watch._post,
    Kind.DENSE: _Watch._dense,
    **dict.fromkeys((Kind.STAGE, *_WEIGHTS), _Watch._weights),
    **dict.fromkeys(_OF_SLOTS, _Watch._moves_by_itself),
}


def _clash(k: int | None, before: int | None) -> bool:
    """Whether an expert cannot run over k behind where it ran: experts leave behind the last
    micro-batch that chose them."""
    return k is None or before is None or k <= before


def _is_count(value: object) -> bool:
    return isinstance(value, SupportsIndex) and index(value) >= 0


def _named(request: Request) -> str:
    """A request as a user wrote it."""
    return str(request).replace("step=", "").replace("micro_batch=", "")
