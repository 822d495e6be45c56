"""CGOPipe: attention on the CPU, weights in pages between hidden states (MoE-Lightning)."""

from collections.abc import Iterator
from itertools import islice

from moebatch.schedule.definition import Traits, job_schedule, prefetch_to_dram
from moebatch.schedule.request import NextPass, Schedule, Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.attention import LOOK_AHEAD, attend_on_cpu, load_or_attend
from moebatch.schedule.steps.kv import KvTraffic
from moebatch.schedule.steps.paged import PagedWeights
from moebatch.schedule.task import Task

_TRAITS = Traits(moves="pages", attention="cpu")


@job_schedule(_TRAITS)
def cgopipe(setup: Setup) -> Schedule:
    """One page of the next layer's weights goes up behind the hidden states of each micro-batch, so
    that these never wait for a whole layer (Algorithm 1).

    A micro-batch of prompts, whose attention is not the CPU's business, attends on the GPU.
    """
    kv, pages, i = KvTraffic(setup), PagedWeights(setup), 0
    while sweep := (yield NextPass()):
        m, ahead = sweep.num_micro_batches, _Ahead(setup, sweep, kv, i)
        if i == 0:
            yield from pages.first(m)
        posts = [(j, k) for j in range(i, i + setup.num_layers) for k in sweep.micro_batches]
        staged = iter(posts)
        yield from ahead.first()
        yield from _stage_ahead(pages, m, islice(staged, min(LOOK_AHEAD, m)))
        for j, k in posts:
            if k == 0:
                yield from prefetch_to_dram(setup, j)
            yield from load_or_attend(sweep, j, k, kv)
            yield from pages.page(j + 1, k, m)
            yield pages.post(sweep, j, k)
            yield from ahead.behind(k)
            yield from _stage_ahead(pages, m, islice(staged, 1))
        i += setup.num_layers


def _stage_ahead(
    pages: PagedWeights, num_pages: int, posts: Iterator[tuple[int, int]]
) -> Iterator[Task]:
    """Pages are staged that go up behind those hidden states."""
    for j, k in posts:
        yield from pages.stage(j + 1, k, num_pages)


class _Ahead:
    """Attention on the CPU, in a pass: of as many micro-batches as it is given before the GPU needs
    the first of them, whatever prompts come between."""

    def __init__(self, setup: Setup, sweep: Sweep, kv: KvTraffic, i: int) -> None:
        self._sweep, self._kv = sweep, kv
        decoding = [k for k in sweep.micro_batches if sweep.attends_on_cpu(k)]
        self._num_first = min(LOOK_AHEAD, len(decoding))
        self._left = iter([(j, k) for j in range(i, i + setup.num_layers) for k in decoding])

    def first(self) -> Iterator[Task]:
        """At the beginning of a pass."""
        return self._attend(self._num_first)

    def behind(self, k: int) -> Iterator[Task]:
        """Behind ``post`` of k: the next one, if k was one of them."""
        return self._attend(int(self._sweep.attends_on_cpu(k)))

    def _attend(self, count: int) -> Iterator[Task]:
        for j, k in islice(self._left, count):
            yield from attend_on_cpu(self._sweep, j, k, self._kv)


@job_schedule(_TRAITS)
def fastdecode(setup: Setup) -> Schedule:
    """The CPU attends beside the GPU, but weights of a layer go up in one piece, behind which the
    hidden states of the next layer have to wait (schedule S2 of MoE-Lightning's Figure 6)."""
    kv, pages, i = KvTraffic(setup), PagedWeights(setup), 0
    while sweep := (yield NextPass()):
        m, ahead = sweep.num_micro_batches, _Ahead(setup, sweep, kv, i)
        if i == 0:
            yield from pages.first(1)
        yield from ahead.first()
        for j in range(i, i + setup.num_layers):
            for k in sweep.micro_batches:
                if k == 0:
                    yield from prefetch_to_dram(setup, j)
                    yield from pages.stage(j + 1, 0, 1)
                yield from load_or_attend(sweep, j, k, kv)
                if k == m - 1:
                    yield from pages.page(j + 1, 0, 1)
                yield pages.post(sweep, j, k)
                yield from ahead.behind(k)
        i += setup.num_layers
