"""CGOPipe: attention on the CPU, weights in pages between hidden states (MoE-Lightning)."""

from collections.abc import Iterator

from moebatch.schedule.definition import Traits, fetch_window, job_schedule
from moebatch.schedule.request import NextPass, Schedule, Sweep
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.attention import LOOK_AHEAD, before_load, up_or_attend
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
    yield from _pipeline(setup, in_pages=True)


@job_schedule(_TRAITS)
def fastdecode(setup: Setup) -> Schedule:
    """The CPU attends beside the GPU, but weights of a layer go up in one piece, behind which the
    hidden states of the next layer have to wait (schedule S2 of MoE-Lightning's Figure 6)."""
    yield from _pipeline(setup, in_pages=False)


def _pipeline(setup: Setup, *, in_pages: bool) -> Schedule:
    kv, pages, i = KvTraffic(setup), PagedWeights(setup), 0

    def prepare(sweep: Sweep, posts: list[tuple[int, int]]) -> Iterator[Task]:
        """What comes before the results of the CPU's attention go up, and the page behind them."""
        for j, k in posts:
            yield from before_load(sweep, j, k, kv)
            if in_pages:
                yield from pages.stage(j + 1, k, sweep.num_micro_batches)

    while sweep := (yield NextPass()):
        m = sweep.num_micro_batches
        num_pages = m if in_pages else 1
        if i == 0:
            yield from pages.first(num_pages)
        posts = [(j, k) for j in range(i, i + setup.num_layers) for k in sweep.micro_batches]
        ahead = min(LOOK_AHEAD, m - 1)
        yield from prepare(sweep, posts[:ahead])
        for number, (j, k) in enumerate(posts):
            following = posts[number + ahead : number + ahead + 1]
            if k == 0:
                yield from fetch_window(setup, j)
                if not in_pages:
                    yield from pages.stage(j + 1, 0, 1)
            if not ahead:
                yield from prepare(sweep, following)
            yield from up_or_attend(sweep, j, k, kv)
            if in_pages or k == m - 1:
                yield from pages.page(j + 1, k if in_pages else 0, num_pages)
            yield pages.post(sweep, j, k)
            if ahead:
                yield from prepare(sweep, following)
        i += setup.num_layers
