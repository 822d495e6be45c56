"""ProMoE's pipeline and the steps that lead to it (its ablation), on a cache of each layer's
experts and whatever predicts the next ones.

promoe_base: experts come when it is their turn to be computed, and stay in the cache.
promoe_prefetch: what is foreseen comes meanwhile; whoever's turn it is comes first.
promoe_preempt: what a gate has chosen comes before all that is foreseen, as soon as it has spoken.
promoe: experts that are at hand are computed first (reordered inference).

That experts come in chunks, its fourth step, is the business of whoever moves them.
"""

from collections.abc import Callable, Iterator

from moebatch.schedule.attention import Attention
from moebatch.schedule.klotski import (
    attend_and_route,
    batch_by_batch,
    dense_layer,
    launch_at_hand,
    prefetch_hot,
)
from moebatch.schedule.kv import KvTraffic
from moebatch.schedule.request import Arrivals, Drop, NextPass, Request, Schedule, Spoken, Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import Task, combine, expert, gate

Step = Callable[[Setup, Sweep, int, KvTraffic], Iterator[Task | Request]]


def promoe(setup: Setup) -> Schedule:
    """Required experts first, those at hand before those on their way, foreseen ones behind them
    (Algorithms 1 and 2)."""

    def step(setup: Setup, sweep: Sweep, i: int, kv: KvTraffic) -> Schedule:
        yield from attend_and_route(sweep, i, kv)
        yield Drop(i)
        chosen = yield Arrivals(i)
        yield from launch_at_hand(setup, i, chosen)
        yield from prefetch_hot(setup, i)
        for e in chosen:
            yield expert(i, e)
        yield combine(i)

    yield from _layer_by_layer(setup, step)


def promoe_preempt(setup: Setup) -> Schedule:
    """The same by number."""

    def step(setup: Setup, sweep: Sweep, i: int, kv: KvTraffic) -> Schedule:
        yield from attend_and_route(sweep, i, kv)
        yield Drop(i)
        yield from prefetch_hot(setup, i)
        yield from batch_by_batch(sweep.micro_batches, i)

    yield from _layer_by_layer(setup, step)


def promoe_prefetch(setup: Setup) -> Schedule:
    """What a gate has chosen is asked for when it is its turn; what was foreseen in vain comes
    all the same."""

    def step(setup: Setup, sweep: Sweep, i: int, kv: KvTraffic) -> Schedule:
        yield from _attend_and_listen(sweep, i, kv)
        yield from prefetch_hot(setup, i)
        yield from batch_by_batch(sweep.micro_batches, i)

    yield from _layer_by_layer(setup, step)


def promoe_base(setup: Setup) -> Schedule:
    """Nothing is foreseen."""

    def step(setup: Setup, sweep: Sweep, i: int, kv: KvTraffic) -> Schedule:
        yield from _attend_and_listen(sweep, i, kv)
        yield from batch_by_batch(sweep.micro_batches, i)

    yield from _layer_by_layer(setup, step, foresees=False)


def _layer_by_layer(setup: Setup, step: Step, *, foresees: bool = True) -> Schedule:
    kv, i = KvTraffic(setup), 0
    while sweep := (yield NextPass()):
        yield from prefetch_hot(setup, i - 1) if foresees else ()
        for _ in range(setup.num_layers):
            yield from (step if setup.is_moe(i) else _dense)(setup, sweep, i, kv)
            i += 1


def _dense(setup: Setup, sweep: Sweep, i: int, kv: KvTraffic) -> Iterator[Task | Request]:
    yield from dense_layer(sweep, i, kv)


def _attend_and_listen(sweep: Sweep, i: int, kv: KvTraffic) -> Iterator[Task | Request]:
    """Attention and gate of every batch, without anything being asked for yet."""
    attention = Attention(sweep, sweep.micro_batches, i, kv)
    for k in sweep.micro_batches:
        yield from attention.of(k)
        yield gate(i, k)
    for k in sweep.micro_batches:
        yield Spoken(i, k)
