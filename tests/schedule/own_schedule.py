"""Experts that have arrived run first; the next layer's likeliest two come meanwhile."""

from moebatch.schedule.definition import Layer, prefetch_likely, schedule
from moebatch.schedule.request import Arrivals, CancelPrefetch, Route, Schedule
from moebatch.schedule.task import combine, expert, gate


@schedule(runs="pass", foresees="likely")
def mine(layer: Layer) -> Schedule:
    i, attention = layer.step, layer.attention()
    for k in layer.micro_batches:
        yield from attention.of(k)
        yield gate(i, k)
    for k in layer.micro_batches:
        yield Route(i, k)
    yield CancelPrefetch(i)
    chosen = yield Arrivals(i)
    yield from prefetch_likely(layer.setup, i)
    for e in chosen:
        yield expert(i, e)
    yield combine(i)
