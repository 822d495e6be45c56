"""Attention of the micro-batches of a step, wherever it is computed."""

from collections.abc import Iterator, Sequence

from moebatch.schedule.request import Sweep
from moebatch.schedule.steps.kv import KvTraffic
from moebatch.schedule.task import Task, attend, attn, load, off, out, pre

LOOK_AHEAD = 2
"""Micro-batches whose attention the CPU has before the GPU needs the first of them (CGOPipe)."""


class Attention:
    """Launches attention of one step. Hidden states of k are complete after the last task of
    ``of(k)``.

    Where the CPU attends, the GPU projects two micro-batches ahead meanwhile.
    """

    def __init__(self, sweep: Sweep, batches: Sequence[int], i: int, kv: KvTraffic) -> None:
        self._sweep = sweep
        self._i = i
        self._kv = kv
        self._batches = batches
        self._next = 0

    def of(self, k: int) -> Iterator[Task]:
        """Attention of micro-batch k; the cache of the next one comes up meanwhile."""
        i, sweep, kv = self._i, self._sweep, self._kv
        place = self._batches.index(k)
        while self._next < min(place + 1 + LOOK_AHEAD, len(self._batches)):
            yield from attend_on_cpu(sweep, i, self._batches[self._next], kv)
            self._next += 1
        if sweep.attends_on_cpu(k):
            yield load(i, k, attn(i, k))
            yield out(i, k, load(i, k))
        else:
            yield from attend_here(sweep, i, k, kv, self._batches[place + 1 : place + 2])


def attend_here(
    sweep: Sweep, i: int, k: int, kv: KvTraffic, following: Sequence[int]
) -> Iterator[Task]:
    """Attention of k where everything else is computed; the cache of the micro-batch that follows
    comes up meanwhile, if there is one and its context is there already."""
    yield from kv.up(sweep, i, k)
    for later in following:
        if not (sweep.attends_on_cpu(later) or sweep.continues(later)):
            yield from kv.up(sweep, i, later)
    yield attend(i, k, *kv.ready(i, k))
    yield from kv.down(sweep, i, k, attend(i, k))


def attend_on_cpu(sweep: Sweep, i: int, k: int, kv: KvTraffic) -> Iterator[Task]:
    """Attention of k on the CPU beside a GPU, up to what has to be loaded; nothing of any other."""
    if not sweep.attends_on_cpu(k):
        return
    yield pre(i, k)
    yield off(i, k, pre(i, k))
    yield from kv.up(sweep, i, k)
    yield attn(i, k, off(i, k), *kv.ready(i, k))
    yield from kv.down(sweep, i, k, attn(i, k))


def load_or_attend(sweep: Sweep, i: int, k: int, kv: KvTraffic) -> Iterator[Task]:
    """What the CPU has made of k comes up, or k attends where everything else is computed."""
    if sweep.attends_on_cpu(k):
        yield load(i, k, attn(i, k))
    else:
        yield from attend_here(sweep, i, k, kv, sweep.micro_batches[k + 1 : k + 2])
