"""Klotski's pipeline and the three steps that lead to it (its Table 3).

simple: every batch walks through the layers alone, the next layer on its way meanwhile.
multi: batches share the weights of a layer, as in FlexGen's zig-zag.
hot: only hot experts come beforehand, the others when a gate has chosen them.
klotski: experts run once over all batches, hot ones first, then in the order in which they arrive.
"""

from collections.abc import Iterator, Sequence

from moebatch.schedule.attention import Attention
from moebatch.schedule.disk_window import fetch_window
from moebatch.schedule.kv import KvTraffic
from moebatch.schedule.request import (
    Announce,
    Arrivals,
    Drop,
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
from moebatch.schedule.slots.arriving import Arriving
from moebatch.schedule.task import Task, combine, dense, expert, gate


def klotski(setup: Setup) -> Schedule:
    """Expert-aware multi-batch pipeline (Algorithm 1)."""
    kv, i = KvTraffic(setup), 0
    yield from prefetch_hot(setup, i - 1)
    while sweep := (yield NextPass()):
        yield from prefetch_hot(setup, i - 1)  # its tokens are known now
        for _ in range(setup.num_layers):
            if setup.is_moe(i):
                yield from attend_and_route(sweep, i, kv)
                yield Drop(i)
                chosen = yield Arrivals(i)
                yield from launch_at_hand(setup, i, chosen)
                yield from prefetch_hot(setup, i)
                yield from kv.up(sweep, i + 1, 0) if _goes_on(setup, i) else ()
                for e in chosen:
                    yield expert(i, e)  # over all batches; its slot is free afterwards
                yield combine(i)
            else:
                yield from dense_layer(sweep, i, kv)
            i += 1


def hot(setup: Setup) -> Schedule:
    """The gate is split off: only the K hot experts of the next layer come before it has spoken."""
    kv, i = KvTraffic(setup), 0
    yield from prefetch_hot(setup, i - 1)
    while sweep := (yield NextPass()):
        yield from prefetch_hot(setup, i - 1)  # its tokens are known now
        for _ in range(setup.num_layers):
            if setup.is_moe(i):
                yield from attend_and_route(sweep, i, kv)
                yield Drop(i)
                yield from prefetch_hot(setup, i)
                yield from batch_by_batch(sweep.micro_batches, i)
            else:
                yield from dense_layer(sweep, i, kv)
            i += 1


def multi(setup: Setup) -> Schedule:
    """Batches share weights: the whole next layer comes while they compute this one in turn."""
    kv, i = KvTraffic(setup), 0
    yield from prefetch_layer(setup, i - 1)
    while sweep := (yield NextPass()):
        for _ in range(setup.num_layers):
            yield from prefetch_layer(setup, i)
            yield from whole_layer(setup, sweep, sweep.micro_batches, i, kv)
            i += 1


def simple(setup: Setup) -> Schedule:
    """Every batch walks alone; the whole next layer comes while it computes this one."""
    kv, i = KvTraffic(setup), 0
    yield from prefetch_layer(setup, i - 1)
    while sweep := (yield NextPass()):
        for k in sweep.micro_batches:
            for _ in range(setup.num_layers):
                yield from prefetch_layer(setup, i)
                yield from whole_layer(setup, sweep, [k], i, kv)
                i += 1


# --- what they are made of ----------------------------------------------------------------------


def prefetch_hot(setup: Setup, i: int) -> Iterator[Request]:
    """The K likeliest experts of each of the steps that follow, the nearest first."""
    for later in setup.next_moe(i, setup.depth):
        yield Announce(later, setup.num_hot)
    yield from fetch_window(setup, i)


def launch_at_hand(setup: Setup, i: int, chosen: Arriving) -> Iterator[Task]:
    """Experts that are there, for a GPU to have work while what comes next is thought about. Not
    where they are computed by whoever launches them: links would stand still meanwhile."""
    if setup.compute == "vram":
        for e in chosen.at_hand:
            yield expert(i, e)


def prefetch_layer(setup: Setup, i: int) -> Iterator[Request]:
    """All experts of the next step that has any, behind those of this one for which there was no
    slot so far: they would only be driven out again."""
    if i >= 0 and setup.is_moe(i):
        yield Announce(i)
    for later in setup.next_moe(i, 1):
        yield Announce(later)
    yield from fetch_window(setup, i)


def attend_and_route(sweep: Sweep, i: int, kv: KvTraffic) -> Iterator[Task | Request]:
    """Attention and gate of every batch. What a batch has chosen is asked for as soon as its gate
    has spoken, while the next batch is on the device."""
    attention = Attention(sweep, sweep.micro_batches, i, kv)
    for k in sweep.micro_batches:
        yield from attention.of(k)
        yield gate(i, k)
        if k:
            yield Route(i, k - 1)
    yield Route(i, sweep.num_micro_batches - 1)


def batch_by_batch(batches: Sequence[int], i: int) -> Schedule:
    """Experts of one batch after those of the other, by number."""
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
    yield from batch_by_batch(batches, i)


def dense_layer(sweep: Sweep, i: int, kv: KvTraffic) -> Iterator[Task]:
    """A layer without experts."""
    attention = Attention(sweep, sweep.micro_batches, i, kv)
    for k in sweep.micro_batches:
        yield from attention.of(k)
    yield dense(i)


def _goes_on(setup: Setup, i: int) -> bool:
    """Whether the pass has a layer after step i."""
    return setup.layer(i) + 1 < setup.num_layers
