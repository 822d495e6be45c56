"""All passes of a job under a policy, alike ones counted together."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby
from math import ceil
from operator import mul

from moebatch.layout.admission import Caps
from moebatch.layout.load import OF_PROMPTS, CountedLoad, PassLoad
from moebatch.plan.replay.passes import job_passes
from moebatch.plan.replay.phases import phases_of
from moebatch.spec.policy.policy import PAGE_TOKENS, Policy
from moebatch.spec.workload import Length, Workload

_WAVES = 6
_MOST_SEQUENCES = 24_000
_FEW_SEQUENCES = 1000
"""So many are replayed one and all."""
_MOST_LOADS = 1200
"""Of more passes, neighbours are counted together."""
_ROUGH = (4, 2)
"""Tokens for which one may stand: a page has as many such."""
_FEWEST_TOKENS = 16
"""Of a prompt and of an answer, that are left."""
_FEWEST_PASSES = 64
_FEW_UNLIKE = 64
"""So few sequences of unequal lengths are replayed token by token: their prompts may take fewer
passes than a token stands for."""
_SOME_UNLIKE = 512
"""In a replay of so few, none stands for more than two: it is quick anyway, and its passes are few.
"""
_ROUGH_PLACES = 256
"""At least so many places are left of a batch that is larger."""
_WORK_OF_PASS = 1024
"""Sequences that cost as much as a pass costs by itself."""
FEW_LOADS = 32
"""Of a rough replay, those with alike numbers of tokens being counted together."""
_ROUNDING = 1 + 1e-12
"""A load that is divided may be so much larger than its share."""
_WAVES_OF_START = 2
"""So many batches of answers, each of as many sequences as have room at once, are taken to be the
start of a replayed job, and one its end. Whole batches are between them: sequences of one length
start and end together."""


def job_loads(workload: Workload, policy: Policy) -> list[CountedLoad]:
    """Passes of the whole job; of a job without a number of sequences, some from its middle.
    Neighbours are counted together where there are very many."""
    if policy.batching == "static" and not workload.lengths:
        return _static_loads(workload, policy)
    return _all(workload, _caps(workload, policy))


def rough_loads(workload: Workload, policy: Policy) -> list[CountedLoad]:
    """The same in a few loads, to compare policies. Each token of a sequence stands for several,
    and where all are alike each sequence does, too, which takes a tenth of the time, or half of it:
    policies are told apart by a percent."""
    if policy.batching == "static":
        return job_loads(workload, policy)
    return _rough(workload, _caps(workload, policy))


def rough_work(workload: Workload, policy: Policy) -> float:
    """Sequences in all passes that `rough_loads` goes through, about: what it costs to replay. Each
    pass costs as much as many sequences in it; those in which none begins or ends are one."""
    caps = _caps(workload, policy)
    count, by = _num_replayed(workload, caps), _tokens_for_one(workload, caps)
    full, *others = (phase.num_passes * count / by for phase in phases_of(workload, policy.room))
    places = caps.sequences / _places_for_one(workload, caps)
    return (full + min(count, sum(others))) * (places + _WORK_OF_PASS)


def _caps(workload: Workload, policy: Policy) -> Caps:
    return Caps.of(policy, workload.most_cached, encodes=workload.is_encoded)


@lru_cache(maxsize=4)  # several machines are asked about one job
def _all(workload: Workload, caps: Caps) -> list[CountedLoad]:
    return _replayed(workload, caps)


@lru_cache(maxsize=256)
def _rough(workload: Workload, caps: Caps) -> list[CountedLoad]:
    by = _tokens_for_one(workload, caps)
    places = _places_for_one(workload, caps)
    smaller = replace(
        caps,
        sequences=ceil(caps.sequences / places),
        tokens=ceil(caps.tokens / places),
        pages=max(1, round(caps.pages / places)),
        page_tokens=PAGE_TOKENS // by,
        prompt_rows=caps.prompt_rows // by,
        most_cached=ceil(caps.most_cached / by),
    )
    loads = _replayed(_fewer(workload, by, places), smaller)
    if caps.encodes and by * places > 1:
        prompt = workload.mean_own_tokens
        # Beside all others, which decode: each that begins is one less of them.
        at_once = prompt * max(1, (caps.tokens - caps.sequences) // max(1, prompt - 1))
        loads = [part for pair in loads for part in _in_whole_prompts(*pair, by, places, at_once)]
    few = alike(loads, FEW_LOADS, encodes=caps.encodes)
    magnified = ((count * by, _magnified(load, by, places, workload)) for count, load in few)
    return [_with_at_most(caps.tokens, *pair) for pair in magnified]


def _in_whole_prompts(
    count: float, load: PassLoad, by: int, places: int, at_once: float
) -> Iterator[CountedLoad]:
    """Rough passes that encode a part of each prompt as passes that encode whole ones, so many
    tokens at once, and passes that encode none and leave layers out. Where a rough pass stands for
    fewer than its prompts need, each does less."""
    share = ceil(by * places * load.prompt_tokens / at_once) / by
    if not share:
        yield count, load
    elif share >= 1:
        yield count * share, load.times(1 / share)
    else:
        encoding = {name: getattr(load, name) / share for name in OF_PROMPTS}
        yield count * share, load._replace(**encoding)
        yield count * (1 - share), load.in_stack(encodes=False)


def _with_at_most(tokens: int, count: float, load: PassLoad) -> CountedLoad:
    """Passes of what was rounded up as more passes, none of which has more tokens than that: a few
    more might be computed in a part of their own."""
    more = load.tokens / tokens
    if more <= 1:
        return count, load
    more *= _ROUNDING
    return count * more, load.divided(more)


@lru_cache(maxsize=16)
def _fewer(workload: Workload, by: int, places: int) -> Workload:
    """A job in which each sequence stands for so many, and each of its tokens."""
    total = workload.num_sequences
    return replace(
        workload,
        num_sequences=total and max(1, total // places),
        mean_prompt_tokens=workload.mean_prompt_tokens / by,
        mean_new_tokens=workload.mean_new_tokens / by,
        mean_shared_tokens=workload.mean_shared_tokens / by,
        lengths=tuple(_shorter(length, by) for length in workload.lengths),
    )


def _shorter(length: Length, by: int) -> Length:
    prompt, new, shared = (round(tokens / by) for tokens in length)
    return Length(max(prompt, shared + 1), max(new, 1), shared)


def _places_for_one(workload: Workload, caps: Caps) -> int:
    """How many sequences one stands for: several where all are alike."""
    return 1 if workload.lengths else max(1, caps.sequences // _ROUGH_PLACES)


def _tokens_for_one(workload: Workload, caps: Caps) -> int:
    """How many tokens of a sequence one stands for. Where lengths differ, half of the sequences are
    shorter than the mean, and all policies are replayed alike, so that they compare."""
    shortest = min(workload.mean_own_tokens, workload.mean_new_tokens)
    if workload.lengths:
        count = _num_replayed(workload, caps)
        if count <= _FEW_UNLIKE:
            return 1
        most = 2 if count <= _SOME_UNLIKE else max(_ROUGH)
        long_enough = (b for b in _ROUGH if b <= most and shortest >= 2 * b * _FEWEST_TOKENS)
        return next(long_enough, 1)
    waves = max(1.0, _num_replayed(workload, caps) / caps.sequences)
    passes = waves * workload.mean_new_tokens
    return next(
        (b for b in _ROUGH if shortest >= b * _FEWEST_TOKENS and passes >= b * _FEWEST_PASSES), 1
    )


def _magnified(load: PassLoad, tokens: int, sequences: int, workload: Workload) -> PassLoad:
    """One of so many passes that a rough one stands for: each sequence was so many, and each of
    its tokens."""
    if tokens == sequences == 1:
        return load
    ended = sequences * (load.logits_rows - load.decode_sequences) / tokens
    fresh = sequences * (load.prompt_slices - load.resumed_slices) / tokens
    # Each of the passes ends within one prompt, which another goes on with; of encoders none does.
    resumed = 0.0 if workload.is_encoded else min(1.0, load.prompt_slices)
    if workload.mean_shared_tokens:  # as many begin as end
        resumed += max(0.0, ended - fresh)
    return PassLoad(
        decode_sequences=sequences * load.decode_sequences,
        decode_positions=sequences * tokens * load.decode_positions,
        prompt_tokens=sequences * load.prompt_tokens,
        prompt_pairs=sequences * tokens * load.prompt_pairs,
        prompt_context=sequences * load.prompt_context,
        prompt_slices=fresh + resumed,
        resumed_slices=resumed,
        logits_rows=sequences * load.decode_sequences + ended,
        spare_pages=sequences * load.spare_pages,
    )


def num_replayed(workload: Workload, batch_size: int) -> int:
    """Sequences of a job that are replayed, of which the others are taken to be copies."""
    total = workload.num_sequences
    enough = min(max(_WAVES * batch_size, _FEW_SEQUENCES), _MOST_SEQUENCES)
    return enough if total is None else min(total, max(enough, batch_size + 1))


def _num_replayed(workload: Workload, caps: Caps) -> int:
    """The same; where all are alike they begin and end together, and the others come in whole
    rounds of them: the last round of a job takes as long as any."""
    total, count = workload.num_sequences, num_replayed(workload, caps.sequences)
    if total is None or workload.lengths:
        return count
    return count + (total - count) % _of_round(workload, caps)


def _of_round(workload: Workload, caps: Caps) -> int:
    """Sequences, all alike, that begin together: they need all pages that they ever have."""
    own = min(ceil(workload.mean_total_tokens - workload.mean_shared_tokens), caps.most_cached)
    return max(1, min(caps.sequences, caps.pages // ceil(own / caps.page_tokens)))


def _replayed(workload: Workload, caps: Caps) -> list[CountedLoad]:
    """Long jobs are replayed in part, and their middle is drawn out to the whole length; without an
    end it is all that there is of them."""
    total, count = workload.num_sequences, _num_replayed(workload, caps)
    passes, new = job_passes(workload, caps, count), workload.mean_new_tokens
    together = caps.sequences if workload.lengths else _of_round(workload, caps)
    if total is not None:
        more = total - count
        return rest_loads(passes, together, more, new, most=_MOST_LOADS, encodes=caps.encodes)
    loads = thinned(list(passes), _MOST_LOADS, encodes=caps.encodes)
    first, last = _middle(loads, together * new)
    return loads[first:last]


def rest_loads(
    rest: Iterable[CountedLoad],
    batch_size: int,
    num_more: int,
    mean_new_tokens: float,
    *,
    most: int,
    encodes: bool,
) -> list[CountedLoad]:
    """At most `most` loads of what is left of a job, where so many more sequences wait than those
    in `rest`: these take their turn in the middle, which lasts until they have ended."""
    loads = thinned(list(rest), most, encodes=encodes)
    if not num_more or not loads:
        return loads
    first, last = _middle(loads, batch_size * mean_new_tokens)
    come = sum(count * load.logits_rows for count, load in loads[first:last])
    longer = 1 + num_more / (come / mean_new_tokens)
    drawn_out = ((count * longer, load) for count, load in loads[first:last])
    return [*loads[:first], *drawn_out, *loads[last:]]


def _middle(loads: Sequence[CountedLoad], tokens_of_wave: float) -> tuple[int, int]:
    """Where the passes in the middle begin and end."""
    ends = list(accumulate(count * load.logits_rows for count, load in loads))
    waves = ends[-1] / tokens_of_wave
    begin = min(_WAVES_OF_START, waves / 3)
    lasts = max(waves - begin - 1, waves / 2)
    parts = (begin, begin + (int(lasts) or lasts))
    first, last = (bisect_left(ends, part * tokens_of_wave) for part in parts)
    return first, max(last, first + 1)


def _static_loads(workload: Workload, policy: Policy) -> list[CountedLoad]:
    """One pass over the prompts of a batch, then one for every further token of its answers.

    As FlexGen and MoE-Lightning's artifact run a job. All sequences are as long as the means say:
    padding to the longest is the caller's business.
    """
    total, encodes, passes = workload.num_sequences, workload.is_encoded, list[CountedLoad]()
    prompt, new = workload.mean_prompt_tokens, workload.mean_new_tokens
    full, rest = (1, 0) if total is None else divmod(total, policy.batch_size)
    for count, size in ((full, policy.batch_size), (min(rest, 1), rest)):
        passes += [
            (count, PassLoad.of_prompts(size, prompt, encodes=encodes)),
            (count * max(0.0, new - (not encodes)), PassLoad.decoding(size, prompt + new / 2)),
        ]
    return [(times, load) for times, load in passes if times]


def alike(loads: Sequence[CountedLoad], most: int, *, encodes: bool) -> list[CountedLoad]:
    """Passes of alike numbers of tokens counted together, as `thinned` has it."""
    return thinned(sorted(loads, key=lambda pair: pair[1].tokens), most, encodes=encodes)


def thinned(loads: Sequence[CountedLoad], most: int, *, encodes: bool) -> list[CountedLoad]:
    """Neighbours counted together, so that there are no more than so many. A load weighs as much as
    the passes that it stands for, and as any other: the mean of a great many passes of one kind and
    of a few of another is like none of them. Of a model that encodes prompts there are up to twice
    as many: passes in which it does have layers that others leave out."""
    if len(loads) <= most:
        return list(loads)
    total = sum(count for count, _ in loads)
    weights = ((count / total + 1 / len(loads)) / 2 for count, _ in loads)
    numbered = zip(accumulate(weights, initial=0.0), loads, strict=False)
    parts = groupby(numbered, key=lambda pair: int(pair[0] * most))
    groups = ([load for _, load in part] for _, part in parts)
    if encodes:
        kinds = (
            [pair for pair in group if bool(pair[1].prompt_tokens) == encoding]
            for group in groups
            for encoding in (True, False)
        )
        return [mean_of(kind) for kind in kinds if kind]
    return [mean_of(group) for group in groups]


def mean_of(loads: Sequence[CountedLoad]) -> CountedLoad:
    """So many passes, counted together as their mean."""
    if len(loads) == 1:
        return loads[0]
    counts, each = zip(*loads, strict=True)
    total = sum(counts)
    means = (sum(map(mul, counts, figures)) / total for figures in zip(*each, strict=True))
    return total, PassLoad(*means)
