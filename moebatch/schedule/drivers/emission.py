"""What a schedule launches: a driver that counts tasks instead of running them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

from moebatch.schedule.registry import find_schedule
from moebatch.schedule.request import (
    Arrivals,
    Arriving,
    GateChosen,
    InOrder,
    NextPass,
    Request,
    Route,
    Sweep,
)
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.steps.kv_route import Place
from moebatch.schedule.task import Kind, Task
from moebatch.spec.machine.hardware import LevelName

_LAYERS = _EXPERTS = _BATCHES = 2
"""Of a small model, and micro-batches that decode and as many of prompts: enough for what repeats
to do so."""

Launched = Mapping[Kind, float]
"""Tasks for one micro-batch in one layer with experts."""


@cache
def launched(
    name: str, top: Place, home: LevelName, *, attends_on_cpu: bool
) -> tuple[Launched, Launched]:
    """Tasks of micro-batches that decode, and of those that hold prompts, in a pass that has passes
    before and behind it.

    Args:
        top: where experts are computed.
        home: where the layer's keys and values live.
        attends_on_cpu: sequences that decode attend on the CPU beside a GPU.
    """
    counts: tuple[Counter[Kind], Counter[Kind]] = Counter(), Counter()
    for task in _second_pass(name, top, home, attends_on_cpu=attends_on_cpu):
        if task.micro_batch is not None:
            counts[task.micro_batch >= _BATCHES][task.kind] += 1
    decode, prompt = (
        {kind: count / (_LAYERS * _BATCHES) for kind, count in of_kind.items()}
        for of_kind in counts
    )
    return decode, prompt


@cache
def computes_together(name: str, top: Place) -> bool:
    """Whether experts that have arrived are computed in one task, where a processor can do so."""
    tasks = _second_pass(name, top, top, attends_on_cpu=False)
    return any(task.others for task in tasks if task.kind is Kind.EXPERT)


@cache
def asks_at_once(name: str) -> bool:
    """Whether a micro-batch's experts are asked for when its gate has chosen; else when it is their
    turn."""
    items = _items(name, "vram", "vram", attends_on_cpu=False)
    return any(isinstance(item, Route) for item in items)


@cache
def comes_in_one_piece(name: str) -> bool:
    """Whether the weights of a layer come in as few pages as there may be, not in one for each
    micro-batch."""
    tasks = _second_pass(name, "vram", "vram", attends_on_cpu=False)
    return sum(task.kind is Kind.PAGE for task in tasks) == _LAYERS


def _second_pass(name: str, top: Place, home: LevelName, *, attends_on_cpu: bool) -> Iterator[Task]:
    """What is launched in it."""
    items = _items(name, top, home, attends_on_cpu=attends_on_cpu)
    return (item for item in items if isinstance(item, Task))


def _items(
    name: str, top: Place, home: LevelName, *, attends_on_cpu: bool
) -> Iterator[Task | Request]:
    """Drives a schedule through two passes: what it says in the second."""
    setup = Setup(
        num_layers=_LAYERS,
        num_experts=_EXPERTS,
        moe_layers=frozenset(range(_LAYERS)),
        num_hot=1,
        kv_homes=(home,) * _LAYERS,
        compute=top,
        most_together=_EXPERTS,
    )
    sweep = Sweep(
        num_micro_batches=2 * _BATCHES,
        on_cpu=(attends_on_cpu,) * _BATCHES + (False,) * _BATCHES,
    )
    schedule, number = find_schedule(name)(setup), 0
    answer: object = None
    while True:
        item = schedule.send(answer)
        if isinstance(item, NextPass):
            number += 1
            if number > 2:
                return
            answer = sweep
            continue
        if number == 2:
            yield item
        answer = _answer(item)


def _answer(item: Task | Request) -> object:
    """All experts are chosen, and there at once."""
    match item:
        case Route() | GateChosen():
            return tuple(range(_EXPERTS))
        case Arrivals(step):
            return Arriving(
                [ExpertKey(step % _LAYERS, expert) for expert in range(_EXPERTS)],
                lambda waiting, of_all: list(waiting),
                lambda waiting: None,
                most_together=_EXPERTS,
            )
        case InOrder():
            return iter(range(_EXPERTS))
    return None
