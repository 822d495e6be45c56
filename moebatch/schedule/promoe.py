"""ProMoE's pipeline and the steps that lead to it (its ablation), on a cache of each layer's
experts and a predictor of the next ones.

promoe_base: experts come when it is their turn to be computed, and stay in the cache.
promoe_prefetch: predicted experts come meanwhile; the expert whose turn it is comes first.
promoe_preempt: what a gate has chosen comes before all that is predicted, as soon as it has chosen.
promoe: experts that are in the cache are computed first (reordered inference).

That experts come in chunks, its fourth step, is up to the lane that moves them.
"""

from collections.abc import Iterator
from dataclasses import replace

from moebatch.schedule.definition import Layer, prefetch_likely, schedule
from moebatch.schedule.klotski import (
    as_they_arrive,
    attend_and_gate,
    attend_and_route,
    by_number,
    hot,
    prefetch_beside_ready,
)
from moebatch.schedule.request import (
    Arrivals,
    Arriving,
    CancelPrefetch,
    GateChosen,
    Request,
    Schedule,
)
from moebatch.schedule.task import Task


@schedule(runs="pass", foresees="likely")
def promoe(layer: Layer) -> Schedule:
    """Required experts first, those in the cache before those on their way, predicted ones behind
    them (Algorithms 1 and 2)."""
    yield from attend_and_route(layer)
    yield CancelPrefetch(layer.step)
    chosen: Arriving = yield Arrivals(layer.step)
    yield from prefetch_beside_ready(layer, chosen)
    yield from as_they_arrive(layer, chosen)


promoe_preempt = replace(hot, name="promoe_preempt")
"""The same by number: Klotski's `hot`."""


@schedule(runs="batch", foresees="likely")
def promoe_prefetch(layer: Layer) -> Schedule:
    """What a gate has chosen is asked for when it is its turn; what was predicted in vain comes
    all the same."""
    yield from _attend_until_chosen(layer)
    yield from prefetch_likely(layer.setup, layer.step)
    yield from by_number(layer)


@schedule(runs="batch", foresees="nothing")
def promoe_base(layer: Layer) -> Schedule:
    """Nothing is predicted."""
    yield from _attend_until_chosen(layer)
    yield from by_number(layer)


def _attend_until_chosen(layer: Layer) -> Iterator[Task | Request]:
    """What every gate has chosen is known, and not required yet."""
    yield from attend_and_gate(layer)
    for k in layer.micro_batches:
        yield GateChosen(layer.step, k)
