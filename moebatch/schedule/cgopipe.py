"""CGOPipe: attention on the CPU, weights in pages between hidden states (MoE-Lightning)."""

from collections.abc import Iterator
from itertools import accumulate, chain, islice, pairwise
from statistics import fmean

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
    """Pages of the next layer's weights go up between the hidden states of the micro-batches, so
    that these never wait for a whole layer (Algorithm 1).

    As many pages as micro-batches: one behind each, where all have as many tokens. A micro-batch of
    prompts, whose attention is not the CPU's business, attends on the GPU, and has more of them.
    """
    kv, pages, i = KvTraffic(setup), PagedWeights(setup), 0
    while sweep := (yield NextPass()):
        m, ahead = sweep.num_micro_batches, _Ahead(setup, sweep, kv, i)
        if i == 0:
            yield from pages.first(m)
        posts = [(j, k) for j in range(i, i + setup.num_layers) for k in sweep.micro_batches]
        behind = _pages_behind(sweep)
        staged = ([(j + 1, p) for p in behind[k]] for j, k in posts)
        yield from ahead.first()
        yield from _stage_ahead(pages, m, islice(staged, min(LOOK_AHEAD, m)))
        for j, k in posts:
            if k == 0:
                yield from prefetch_to_dram(setup, j)
            yield from load_or_attend(sweep, j, k, kv)
            if k == 0 and sweep.attends_on_cpu(k):
                yield from _first_prompts_up(sweep, j, kv)
            for p in behind[k]:
                yield from pages.page(j + 1, p, m)
            yield pages.post(sweep, j, k)
            yield from ahead.behind(k)
            yield from _stage_ahead(pages, m, islice(staged, 1))
        i += setup.num_layers


def _pages_behind(sweep: Sweep) -> list[range]:
    """Pages that go up behind each micro-batch: those that attend on the CPU, and the others, have
    their share by tokens, since the GPU is busy with them for as long, alike within each kind."""
    num_pages = sweep.num_micro_batches
    tokens = {True: list[int](), False: list[int]()}
    for k in sweep.micro_batches:
        tokens[sweep.attends_on_cpu(k)].append(sweep.tokens[k] if sweep.tokens else 1)
    means = [fmean(tokens[sweep.attends_on_cpu(k)]) for k in sweep.micro_batches]
    ends = [round(num_pages * so_far / sum(means)) for so_far in accumulate(means)]
    return [range(*pair) for pair in pairwise([0, *ends])]


def _first_prompts_up(sweep: Sweep, j: int, kv: KvTraffic) -> Iterator[Task]:
    """The cache of those behind micro-batches that decode comes before pages, the first of which
    waits for the layer before."""
    of_prompts = (k for k in sweep.micro_batches if not sweep.attends_on_cpu(k))
    yield from kv.up(sweep, j, next(of_prompts, sweep.num_micro_batches))


def _stage_ahead(
    pages: PagedWeights, num_pages: int, staged: Iterator[list[tuple[int, int]]]
) -> Iterator[Task]:
    """Pages are staged that go up behind the hidden states of some micro-batches."""
    for j, p in chain.from_iterable(staged):
        yield from pages.stage(j, p, num_pages)


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
