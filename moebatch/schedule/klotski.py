"""Klotski's pipeline and the three steps that lead to it (its Table 3).

simple: every micro-batch walks through the layers alone, the next layer on its way meanwhile.
multi: micro-batches share the weights of a layer, as in FlexGen's zig-zag.
hot: only hot experts are prefetched, the others come when a gate has chosen them.
klotski: experts run once over all micro-batches, hot ones first, then in the order of arrival.
"""

from collections.abc import Iterator

from moebatch.schedule.definition import (
    Layer,
    Traits,
    dense_layer,
    job_schedule,
    leave_out,
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
    Whole,
)
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.kv import KvTraffic
from moebatch.schedule.task import Task, combine, expert, experts, gate


@schedule(runs="pass", foresees="likely")
def klotski(layer: Layer) -> Schedule:
    """Expert-aware multi-batch pipeline (Algorithm 1): experts that gates have chosen come before
    those that are likely in the next layers."""
    yield from attend_and_route(layer)
    yield CancelPrefetch(layer.step)
    chosen: Arriving = yield Arrivals(layer.step)
    yield from prefetch_beside_ready(layer, chosen)
    yield from layer.prefetch_kv()
    yield from as_they_arrive(layer, chosen)


@schedule(runs="batch", foresees="likely")
def hot(layer: Layer) -> Schedule:
    """The gate is split off: only the K hot experts of the next layer come before it has chosen."""
    yield from attend_and_route(layer)
    yield CancelPrefetch(layer.step)
    yield from prefetch_likely(layer.setup, layer.step)
    yield from by_number(layer)


@schedule(runs="batch", foresees="layer")
def multi(layer: Layer) -> Schedule:
    """Micro-batches share weights: the whole next layer comes while they compute this one in
    turn."""
    yield from whole_layer(layer)


@job_schedule(Traits(runs="batch", foresees="layer", shares_weights=False))
def simple(setup: Setup) -> Schedule:
    """Every micro-batch walks alone; the whole next layer comes while it computes this one."""
    kv, i = KvTraffic(setup), 0
    yield from prefetch_layer(setup, i - 1)
    while sweep := (yield NextPass()):
        in_pass = setup.in_pass(sweep)
        for k in sweep.micro_batches:
            yield from leave_out(in_pass, i)
            for j in in_pass.steps(i):
                yield from prefetch_layer(in_pass, j)
                layer = Layer(setup=in_pass, sweep=sweep, step=j, kv=kv, micro_batches=[k])
                yield from (whole_layer(layer) if setup.is_moe(j) else dense_layer(layer))
            i += setup.num_layers


# --- what they are made of ----------------------------------------------------------------------


def attend_and_gate(layer: Layer) -> Iterator[Task]:
    """Attention and gate of every micro-batch, without anything being asked for yet."""
    attention = layer.attention()
    for k in layer.micro_batches:
        yield from attention.of(k)
        yield gate(layer.step, k)


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


def prefetch_beside_ready(layer: Layer, chosen: Arriving) -> Iterator[Task | Request]:
    """Asks for the likely experts of the next layers. A GPU is given the chosen ones that are
    ready, to have work while the likely ones are worked out; not where the thread that launches
    experts computes them: links would stand still meanwhile."""
    if layer.setup.compute == "vram":
        for group in chosen.ready:
            yield experts(layer.step, group)
    yield from prefetch_likely(layer.setup, layer.step)


def as_they_arrive(layer: Layer, chosen: Arriving) -> Iterator[Task]:
    """Each expert once over all micro-batches, those that are ready first; its slot is free
    afterwards."""
    for group in chosen.groups:
        yield experts(layer.step, group)
    yield combine(layer.step)


def by_number(layer: Layer) -> Schedule:
    """Experts of one micro-batch after those of the other, by number."""
    i = layer.step
    for k in layer.micro_batches:
        for e in (yield InOrder(i, k)):
            yield expert(i, e, k)
    yield Free(i)
    yield combine(i)


def whole_layer(layer: Layer) -> Schedule:
    """A layer whose experts are all loaded before the first of them runs."""
    yield from attend_and_load_all(layer)
    yield from by_number(layer)


def attend_and_load_all(layer: Layer) -> Iterator[Task | Request]:
    """Attention and gates, until all experts are there, chosen or not."""
    yield from attend_and_gate(layer)
    yield Whole(layer.step)
    for k in layer.micro_batches:
        yield Route(layer.step, k)
