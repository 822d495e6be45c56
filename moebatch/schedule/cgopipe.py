"""CGOPipe: attention on the CPU, weights in pages between hidden states (MoE-Lightning)."""

from collections.abc import Iterator
from itertools import accumulate, chain, islice, pairwise
from statistics import fmean

from moebatch.schedule.definition import Traits, job_schedule
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
        m, in_pass = sweep.num_micro_batches, setup.in_pass(sweep)
        steps = in_pass.steps(i)
        ahead, behind = _Ahead(sweep, steps, kv), _pages_behind(sweep)
        yield from pages.first(steps[0], pages.pages(steps[0], m))
        posts = [(j, k) for j in steps for k in sweep.micro_batches]
        staged = ([(in_pass.after(j), p) for p in behind[k]] for j, k in posts)
        yield from ahead.first()
        yield from _stage_ahead(pages, m, islice(staged, min(LOOK_AHEAD, m)))
        for j, k in posts:
            yield from load_or_attend(sweep, j, k, kv)
            if k == 0 and sweep.attends_on_cpu(k):
                yield from _first_prompts_up(sweep, j, kv)
            for p in behind[k]:
                yield from pages.page(in_pass.after(j), p, m)
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

    def __init__(self, sweep: Sweep, steps: range, kv: KvTraffic) -> None:
        self._sweep, self._kv = sweep, kv
        decoding = [k for k in sweep.micro_batches if sweep.attends_on_cpu(k)]
        self._num_first = min(LOOK_AHEAD, len(decoding))
        self._left = iter([(j, k) for j in steps for k in decoding])

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
        m, in_pass = sweep.num_micro_batches, setup.in_pass(sweep)
        steps = in_pass.steps(i)
        ahead = _Ahead(sweep, steps, kv)
        yield from pages.first(steps[0], pages.pages(steps[0], 1))
        yield from ahead.first()
        for j in steps:
            for k in sweep.micro_batches:
                if k == 0:
                    yield from pages.stage(in_pass.after(j), 0, 1)
                yield from load_or_attend(sweep, j, k, kv)
                if k == m - 1:
                    yield from pages.page(in_pass.after(j), 0, 1)
                yield pages.post(sweep, j, k)
                yield from ahead.behind(k)
        i += setup.num_layers
