"""Pre-gated MoE, and the two baselines that it compares itself with."""

from moebatch.schedule.attention import Attention
from moebatch.schedule.disk_window import fetch_window
from moebatch.schedule.klotski import (
    attend_and_route,
    dense_layer,
    prefetch_layer,
)
from moebatch.schedule.kv import KvTraffic
from moebatch.schedule.request import Arrivals, Free, NextPass, Route, Schedule, Select, Whole
from moebatch.schedule.setup import Setup
from moebatch.schedule.task import combine, expert, gate


def pregated(setup: Setup) -> Schedule:
    """The gate of a block selects the experts of the block that is N later, N being the activation
    level, which migrate while this one computes; the first N blocks have gates of their own.

    Exactly the experts that are chosen come, and the slot of each is free when its block is done.
    From disk to main memory, too, they come one by one, since they are known early enough.
    """
    kv, i = KvTraffic(setup), 0
    while sweep := (yield NextPass()):
        for _ in range(setup.num_layers):
            if setup.is_moe(i):
                yield from attend_and_route(sweep, i, kv)
                yield Select(i)
                for e in (yield Arrivals(i)):
                    yield expert(i, e)
                yield combine(i)
            else:
                yield from dense_layer(sweep, i, kv)
            i += 1


def ondemand(setup: Setup) -> Schedule:
    """Nothing comes before a gate has asked for it.

    Of several experts of a block, one computes while the next one comes; the paper, with one expert
    of one sequence, adds both up, which is the same there.
    """
    kv, i = KvTraffic(setup), 0
    while sweep := (yield NextPass()):
        for _ in range(setup.num_layers):
            yield from fetch_window(setup, i - 1)
            if setup.is_moe(i):
                yield from attend_and_route(sweep, i, kv)
                for e in (yield Arrivals(i)):
                    yield expert(i, e)
                yield combine(i)
            else:
                yield from dense_layer(sweep, i, kv)
            i += 1


def prefetch_all(setup: Setup) -> Schedule:
    """All experts of the next layer come while this one computes, chosen or not."""
    kv, i = KvTraffic(setup), 0
    yield from prefetch_layer(setup, i - 1)
    while sweep := (yield NextPass()):
        for _ in range(setup.num_layers):
            yield from prefetch_layer(setup, i)
            if setup.is_moe(i):
                attention = Attention(sweep, sweep.micro_batches, i, kv)
                for k in sweep.micro_batches:
                    yield from attention.of(k)
                    yield gate(i, k)
                yield Whole(i)
                for k in sweep.micro_batches:
                    yield Route(i, k)
                for e in (yield Arrivals(i)):
                    yield expert(i, e)
                yield Free(i)
                yield combine(i)
            else:
                yield from dense_layer(sweep, i, kv)
            i += 1
