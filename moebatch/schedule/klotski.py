"""Klotski's pipeline and the three steps that lead to it (its Table 3).

simple: every micro-batch walks through the layers alone, the next layer on its way meanwhile.
multi: micro-batches share the weights of a layer, as in FlexGen's zig-zag.
hot: only hot experts are prefetched, the others come when a gate has chosen them.
klotski: experts run once over all micro-batches, hot ones first, then in the order of arrival.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from moebatch.schedule.definition import (
    Layer,
    Traits,
    job_schedule,
    prefetch_layer,
    prefetch_likely,
    schedule,
)
from moebatch.schedule.request import (
    Arrivals,
    Arriving,
    CancelPrefetch,
    Free,
    InOrder,
    NextPass,
    Request,
    Route,
    Schedule,
    Sweep,
    Whole,
)
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.attention import Attention
from moebatch.schedule.steps.kv import KvTraffic
from moebatch.schedule.task import Task, combine, dense, expert, experts, gate


@schedule(runs="pass", foresees="likely")
def klotski(layer: Layer) -> Schedule:
    """Expert-aware multi-batch pipeline (Algorithm 1)."""
    chosen = yield from chosen_before_likely(layer)
    yield from layer.prefetch_cache()
    yield from as_they_arrive(layer, chosen)


@schedule(runs="batch", foresees="likely")
def hot(layer: Layer) -> Schedule:
    """The gate is split off: only the K hot experts of the next layer come before it has chosen."""
    yield from attend_and_route(layer)
    yield CancelPrefetch(layer.step)
    yield from prefetch_likely(layer.setup, layer.step)
    yield from by_number(layer.micro_batches, layer.step)


@schedule(runs="batch", foresees="layer")
def multi(layer: Layer) -> Schedule:
    """Micro-batches share weights: the whole next layer comes while they compute this one in
    turn."""
    yield from whole_layer(layer.setup, layer.sweep, layer.micro_batches, layer.step, layer.kv)


@job_schedule(Traits(runs="batch", foresees="layer", shares_weights=False))
def simple(setup: Setup) -> Schedule:
    """Every micro-batch walks alone; the whole next layer comes while it computes this one."""
    kv, i = KvTraffic(setup), 0
    yield from prefetch_layer(setup, i - 1)
    while sweep := (yield NextPass()):
        for k in sweep.micro_batches:
            for _ in range(setup.num_layers):
                yield from prefetch_layer(setup, i)
                yield from whole_layer(setup, sweep, [k], i, kv)
                i += 1


# --- what they are made of ----------------------------------------------------------------------


def chosen_before_likely(layer: Layer) -> Generator[Task | Request, Any, Arriving]:
    """Experts that gates choose are asked for before those that are likely in the next layers.

    A GPU is given those that are ready, to have work while the likely ones are worked out; not
    where the thread that launches experts computes them: links would stand still meanwhile.
    """
    yield from attend_and_route(layer)
    yield CancelPrefetch(layer.step)
    chosen: Arriving = yield Arrivals(layer.step)
    if layer.setup.compute == "vram":
        for group in chosen.ready:
            yield experts(layer.step, group)
    yield from prefetch_likely(layer.setup, layer.step)
    return chosen


def attend_and_route(layer: Layer) -> Iterator[Task | Request]:
    """Attention and gate of every micro-batch. What a micro-batch has chosen is asked for as soon
    as its gate has chosen, while the next micro-batch is on the device."""
    i, attention = layer.step, layer.attention()
    for k in layer.micro_batches:
        yield from attention.of(k)
        yield gate(i, k)
        if k:
            yield Route(i, k - 1)
    yield Route(i, layer.sweep.num_micro_batches - 1)


def as_they_arrive(layer: Layer, chosen: Arriving) -> Iterator[Task]:
    """Each expert once over all micro-batches, those that are ready first; its slot is free
    afterwards."""
    for group in chosen.groups:
        yield experts(layer.step, group)
    yield combine(layer.step)


def by_number(batches: Sequence[int], i: int) -> Schedule:
    """Experts of one micro-batch after those of the other, by number."""
    for k in batches:
        for e in (yield InOrder(i, k)):
            yield expert(i, e, k)
    yield Free(i)
    yield combine(i)


def whole_layer(
    setup: Setup, sweep: Sweep, batches: Sequence[int], i: int, kv: KvTraffic
) -> Schedule:
    """A layer whose experts are all loaded before the first of them runs."""
    attention = Attention(sweep, batches, i, kv)
    for k in batches:
        yield from attention.of(k)
        if setup.is_moe(i):
            yield gate(i, k)
    if not setup.is_moe(i):
        yield dense(i)
        return
    yield Whole(i)
    for k in batches:
        yield Route(i, k)
    yield from by_number(batches, i)
