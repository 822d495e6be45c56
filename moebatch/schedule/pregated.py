"""Pre-gated MoE, and the two baselines that it compares itself with."""

from moebatch.schedule.definition import Layer, prefetch_to_dram, schedule
from moebatch.schedule.klotski import as_they_arrive, attend_and_load_all, attend_and_route
from moebatch.schedule.request import Arrivals, Arriving, Free, Schedule, Select
from moebatch.schedule.task import combine, experts


@schedule(runs="pass", foresees="pre-gate")
def pregated(layer: Layer) -> Schedule:
    """The gate of a block selects the experts of the block that is N later, N being the activation
    level, which migrate while this one computes; the first N blocks have gates of their own.

    Exactly the experts that are chosen come, and the slot of each is free when its block is done.
    From disk to main memory, too, they come one by one, since they are known early enough.
    """
    yield from attend_and_route(layer)
    yield Select(layer.step)
    yield from as_they_arrive(layer, (yield Arrivals(layer.step)))


@schedule(runs="pass", foresees="nothing")
def ondemand(layer: Layer) -> Schedule:
    """Nothing comes before a gate has asked for it.

    Of several experts of a block, one computes while the next one comes; the paper, with one expert
    of one sequence, adds both up, which is the same there.
    """
    yield from prefetch_to_dram(layer.setup, layer.step - 1)
    yield from attend_and_route(layer)
    yield from as_they_arrive(layer, (yield Arrivals(layer.step)))


@schedule(runs="pass", foresees="layer")
def prefetch_all(layer: Layer) -> Schedule:
    """All experts of the next layer come while this one computes, chosen or not."""
    yield from attend_and_load_all(layer)
    chosen: Arriving = yield Arrivals(layer.step)
    for group in chosen.groups:
        yield experts(layer.step, group)
    yield Free(layer.step)
    yield combine(layer.step)
