"""What a schedule launches: a driver that counts tasks instead of running them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

from moebatch.schedule.registry import find_schedule
from moebatch.schedule.request import Arrivals, InOrder, NextPass, Schedule, Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.kv_route import Place
from moebatch.schedule.task import Kind, Task
from moebatch.spec.machine.hardware import LevelName

_LAYERS = _EXPERTS = _BATCHES = 2
"""Of a small model, and micro-batches that decode and as many of prompts: enough for what repeats
to do so."""

Launched = Mapping[Kind, float]
"""Tasks for one micro-batch in one layer with experts."""


class _All:
    """Chosen experts that have all arrived."""

    @property
    def ready(self) -> Iterator[int]:
        return iter(())

    def __iter__(self) -> Iterator[int]:
        return iter(range(_EXPERTS))


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
    setup = Setup(
        num_layers=_LAYERS,
        num_experts=_EXPERTS,
        moe_layers=frozenset(range(_LAYERS)),
        num_hot=1,
        kv_homes=(home,) * _LAYERS,
        compute=top,
    )
    sweep = Sweep(
        num_micro_batches=2 * _BATCHES,
        on_cpu=(attends_on_cpu,) * _BATCHES + (False,) * _BATCHES,
    )
    counts: tuple[Counter[Kind], Counter[Kind]] = Counter(), Counter()
    for task in _second_pass(find_schedule(name)(setup), sweep):
        if task.micro_batch is not None:
            counts[task.micro_batch >= _BATCHES][task.kind] += 1
    decode, prompt = (
        {kind: count / (_LAYERS * _BATCHES) for kind, count in of_kind.items()}
        for of_kind in counts
    )
    return decode, prompt


def _second_pass(schedule: Schedule, sweep: Sweep) -> Iterator[Task]:
    """Drives a schedule through two passes."""
    number = 0
    answer: object = None
    while True:
        item = schedule.send(answer)
        answer = None
        match item:
            case Task():
                if number == 2:
                    yield item
            case NextPass():
                number += 1
                if number > 2:
                    return
                answer = sweep
            case Arrivals():
                answer = _All()
            case InOrder():
                answer = iter(range(_EXPERTS))
            case _:
                pass
