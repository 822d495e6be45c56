"""FlexGen's zig-zag block schedule, with attention on the GPU or on the CPU."""

from moebatch.schedule.definition import Traits, job_schedule
from moebatch.schedule.request import NextPass, Schedule, Sync
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.attention import attend_on_cpu, load_or_attend
from moebatch.schedule.steps.kv import KvTraffic
from moebatch.schedule.steps.paged import PagedWeights


@job_schedule(Traits(moves="block", attention="gpu"))
def flexgen(setup: Setup) -> Schedule:
    """Attention on the GPU: the cache of each micro-batch comes up while the one before computes
    (S4 of MoE-Lightning's Figure 6)."""
    yield from zig_zag(setup)


@job_schedule(Traits(moves="block", attention="cpu"))
def flexgen_c(setup: Setup) -> Schedule:
    """Attention on the CPU: each micro-batch goes through GPU, CPU and the copies between them, one
    after the other (S3)."""
    yield from zig_zag(setup)


def zig_zag(setup: Setup) -> Schedule:
    """All micro-batches of a layer, then the next layer, whose weights come up in one piece beside
    the first micro-batch. After each micro-batch everything waits for everything.

    Where attention is computed is a matter of the policy, so both forms are this.
    """
    kv, weights, i = KvTraffic(setup), PagedWeights(setup), 0
    while sweep := (yield NextPass()):
        in_pass = setup.in_pass(sweep)
        steps = in_pass.steps(i)
        yield from weights.first(steps[0], weights.block(steps[0]))
        for j in steps:
            yield from weights.block(in_pass.after(j))
            for k in sweep.micro_batches:
                yield from attend_on_cpu(sweep, j, k, kv)
                yield from load_or_attend(sweep, j, k, kv)
                yield weights.post(sweep, j, k)
                yield Sync()
        i += setup.num_layers
