"""All passes of a job under a policy, alike ones counted together."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from math import ceil

from moebatch.layout.load import CountedLoad, PassLoad
from moebatch.plan.passes import Replay, job_passes
from moebatch.spec.policy import Policy
from moebatch.spec.workload import Workload

_WAVES = 6
_MOST_SEQUENCES = 24_000
_FEW_SEQUENCES = 1000
"""So many are replayed one and all."""
_MOST_LOADS = 1200
"""Of more passes, neighbours are counted together."""
_MIDDLE_WAVES = (2, 5)
"""Full batches of answers between which a replayed job knows neither start nor end. Whole ones:
sequences of one length start and end together."""


def job_loads(
    workload: Workload, policy: Policy, *, waves: int = _WAVES, most: int = _MOST_LOADS
) -> list[CountedLoad]:
    """Passes of the whole job; of a job without a number of sequences, some from its middle.

    Args:
        waves: so many full batches of a long job are replayed.
        most: neighbours are counted together, so that there are no more loads than so many.
    """
    if policy.batching == "static" and not workload.lengths:
        return _static_loads(workload, policy)
    return _replayed(workload, policy, waves, most)


def num_replayed(workload: Workload, policy: Policy, waves: int = _WAVES) -> int:
    """Sequences of a job that are replayed, of which the others are taken to be copies."""
    total = workload.num_sequences
    enough = min(max(waves * policy.batch_size, _FEW_SEQUENCES), _MOST_SEQUENCES)
    return enough if total is None else min(total, max(enough, policy.batch_size + 1))


def _replayed(workload: Workload, policy: Policy, waves: int, most: int) -> list[CountedLoad]:
    """Long jobs are replayed in part, and their middle is drawn out to the whole length."""
    total, count = workload.num_sequences, num_replayed(workload, policy, waves)
    loads = thinned(list(job_passes(workload, policy, count)), most)
    if total == count:
        return loads
    first, last = _middle(loads, policy.batch_size * workload.mean_new_tokens)
    middle = loads[first:last]
    if total is None:
        return middle
    return _drawn_out(loads, (first, last), total - count, workload.mean_new_tokens)


def rest_loads(
    rest: Replay, policy: Policy, num_more: int, mean_new_tokens: float, *, most: int
) -> list[CountedLoad]:
    """At most `most` loads of what is left of a job, where so many more sequences wait than those
    in `rest`: these take their turn in the middle."""
    loads = thinned(list(rest), most)
    if not num_more or not loads:
        return loads
    middle = _middle(loads, policy.batch_size * mean_new_tokens)
    return _drawn_out(loads, middle, num_more, mean_new_tokens)


def _drawn_out(
    loads: Sequence[CountedLoad], middle: tuple[int, int], num_more: int, mean_new_tokens: float
) -> list[CountedLoad]:
    """The same passes where those in the middle last until so many more sequences have ended."""
    first, last = middle
    come = sum(count * load.logits_rows for count, load in loads[first:last])
    longer = 1 + num_more / (come / mean_new_tokens)
    drawn = ((count * longer, load) for count, load in loads[first:last])
    return [*loads[:first], *drawn, *loads[last:]]


def _middle(loads: Sequence[CountedLoad], tokens_of_wave: float) -> tuple[int, int]:
    """Where the passes in the middle begin and end."""
    ends = list(accumulate(count * load.logits_rows for count, load in loads))
    waves = ends[-1] / tokens_of_wave
    first, last = _MIDDLE_WAVES
    parts = (min(first, waves * first / _WAVES), max(int(waves) - 1, waves * last / _WAVES))
    first, last = (bisect_left(ends, part * tokens_of_wave) for part in parts)
    return first, max(last, first + 1)


def _static_loads(workload: Workload, policy: Policy) -> list[CountedLoad]:
    """One pass over the prompts of a batch, then one for every further token of its answers.

    As FlexGen and MoE-Lightning's artifact run a job. All sequences are as long as the means say:
    padding to the longest is the caller's business.
    """
    batch, total = policy.batch_size, workload.num_sequences
    prompt, new = workload.mean_prompt_tokens, workload.mean_new_tokens
    full, rest = (1, 0) if total is None else divmod(total, batch)
    return [
        *_static_batch(full, batch, prompt, new),
        *_static_batch(min(rest, 1), rest, prompt, new),
    ]


def _static_batch(count: int, batch: int, prompt: float, new: float) -> list[CountedLoad]:
    """So many batches of one size."""
    prefill = PassLoad(
        prompt_tokens=batch * prompt,
        prompt_pairs=batch * prompt * (prompt + 1) / 2,
        logits_rows=batch,
    )
    decode = PassLoad(
        decode_sequences=batch,
        decode_positions=batch * (prompt + new / 2),
        logits_rows=batch,
    )
    passes = ((count, prefill), (count * max(0.0, new - 1), decode))
    return [(times, load) for times, load in passes if times]


def thinned(loads: Sequence[CountedLoad], most: int) -> list[CountedLoad]:
    """Neighbours counted together, so that there are no more than so many."""
    together = ceil(len(loads) / most) or 1
    groups = (loads[first : first + together] for first in range(0, len(loads), together))
    return [mean_of(group) for group in groups]


def mean_of(loads: Sequence[CountedLoad]) -> CountedLoad:
    """So many passes, counted together as their mean."""
    if len(loads) == 1:
        return loads[0]
    total = sum(count for count, _ in loads)
    means = {
        field.name: sum(count * getattr(load, field.name) for count, load in loads) / total
        for field in fields(PassLoad)
    }
    return total, PassLoad(**means)
