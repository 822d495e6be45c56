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

    A micro-batch of prompts, whose attention is not the CPU's business, attends on the GPU. With
    fewer than three micro-batches there are fewer to look ahead to.
    """
    kv, pages, i = KvTraffic(setup), PagedWeights(setup), 0
    while sweep := (yield NextPass()):
        m = sweep.num_micro_batches
        if i == 0:
            yield from pages.first(m)
        posts = [(j, k) for j in range(i, i + setup.num_layers) for k in sweep.micro_batches]
        ahead = iter(posts)
        yield from _attend_ahead(sweep, kv, pages, islice(ahead, _num_ahead(m)))
        for j, k in posts:
            if k == 0:
                yield from prefetch_to_dram(setup, j)
            yield from load_or_attend(sweep, j, k, kv)
            yield from pages.page(j + 1, k, m)
            yield pages.post(sweep, j, k)
            yield from _attend_ahead(sweep, kv, pages, islice(ahead, 1))
        i += setup.num_layers


def _attend_ahead(
    sweep: Sweep, kv: KvTraffic, pages: PagedWeights, posts: Iterator[tuple[int, int]]
) -> Iterator[Task]:
    """Attention on the CPU, and the pages that go up behind its results are staged."""
    for j, k in posts:
        yield from attend_on_cpu(sweep, j, k, kv)
        yield from pages.stage(j + 1, k, sweep.num_micro_batches)


def _num_ahead(num_micro_batches: int) -> int:
    """Micro-batches whose attention the CPU is given before the GPU needs the first of them."""
    return max(1, min(LOOK_AHEAD, num_micro_batches - 1))


@job_schedule(_TRAITS)
def fastdecode(setup: Setup) -> Schedule:
    """The CPU attends beside the GPU, but weights of a layer go up in one piece, behind which the
    hidden states of the next layer have to wait (schedule S2 of MoE-Lightning's Figure 6)."""
    kv, pages, i = KvTraffic(setup), PagedWeights(setup), 0
    while sweep := (yield NextPass()):
        if i == 0:
            yield from pages.first(1)
        m = sweep.num_micro_batches
        posts = [(j, k) for j in range(i, i + setup.num_layers) for k in sweep.micro_batches]
        ahead = iter(posts)
        for j, k in islice(ahead, _num_ahead(m)):
            yield from attend_on_cpu(sweep, j, k, kv)
        for j, k in posts:
            if k == 0:
                yield from prefetch_to_dram(setup, j)
                yield from pages.stage(j + 1, 0, 1)
            yield from load_or_attend(sweep, j, k, kv)
            if k == m - 1:
                yield from pages.page(j + 1, 0, 1)
            yield pages.post(sweep, j, k)
            for later, other in islice(ahead, 1):
                yield from attend_on_cpu(sweep, later, other, kv)
        i += setup.num_layers
