"""A policy tried on the job itself, pass by pass, beside its neighbours.

The planner's objective knows mean lengths only, and its batches are two to a doubling. How many
sequences share a cache, how well passes are filled, and how long the last ones take, shows in a
replay.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from math import inf

from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import rough_work
from moebatch.plan.search.known import Known
from moebatch.plan.search.neighbours import (
    each_once,
    far_away,
    fewer_pages,
    in_even_passes,
    in_even_rounds,
    in_fewer_rounds,
    leaps,
    neighbours,
    passes_of,
    up_with_fewer_pages,
    with_all_pages,
    with_more_on_disk,
)
from moebatch.plan.search.widest import widened, with_widest_cache
from moebatch.spec.policy.policy import Policy

_MOST_REPLAYED = 2**25
"""Sequences in all passes that are replayed: a second or two."""
_SOME_REPLAYS = 24
"""A climb that may make fewer may make up to twice as many as that allows."""
_CHEAP = 16
"""Where so many policies may be replayed, one more costs little."""
_FEW_REPLAYS = 3
"""So many of a round's policies are replayed where lengths are means: the most promising ones."""
_PROMISING = 1.03
"""A policy that takes longer than this by mean lengths is not replayed there."""
_ROUND_LESS = 1.05
"""The same of a policy with a round less, or even ones, of which mean lengths say less."""
_NEAR = 1.3
"""A rival that takes longer than this by mean lengths is not replayed."""
_NEEDS_DISK = 1.01
"""So much faster has a policy to be that needs a disk in every pass: other programs want it too,
and it wears where keys and values are written."""
_WORTH_A_DISK = 1.05
"""So much faster by mean lengths have twice the sequences to be, with more of the cache there."""
_ABREAST = 1.03
"""A climb begins at every rival that takes no longer than this when replayed: which of them leads
higher does not show from below."""
_FEWEST_LOADS = 8
_BEHIND = 1.02
"""A policy that takes longer than this in so few loads is not the best one in more."""
_LEAST_GAIN = 1.01
"""What is less than that by mean lengths is not worth a round."""
_LEAST_SHOWN = 1.005
"""The same by rough replays, which show no less."""


def refined(
    problem: Problem, known: Known, policy: Policy, *rivals: Policy
) -> tuple[float, Policy]:
    """The best policy that is found by climbing from this one, or from a rival that a replay shows
    to be faster, and its seconds per token: batch, micro-batch, tokens of a pass, experts that
    stay, slots, levels of the cache of keys and values, which gets as many pages as there is room
    for."""
    near_s = known.mean_s(policy) * _NEAR
    near = [one for one in (policy, *rivals) if known.mean_s(one) <= near_s]
    reached: dict[Policy, Policy] = {}
    climbed = [_climbed(problem, known, one, reached) for one in near]
    spilled = [end for one in climbed for end in _spilled(problem, known, one, reached)]
    # Mean lengths may lead astray: lengths differ, or sequences that are alike all begin together.
    led_astray = near if problem.workload.lengths else ()
    if not led_astray and _num_replays(problem, policy) >= _CHEAP:
        led_astray = [
            one
            for one, end in zip(near, climbed, strict=True)
            if known.replayed_s(one) < known.replayed_s(end)
        ]
    begun = each_once(*led_astray, *climbed, *spilled)
    timed = [(known.replayed_s(one), one) for one in begun]
    near_s = min(seconds for seconds, _ in timed) * _ABREAST
    ends = [
        _climbed_by_replays(problem, known, (seconds, one))
        for seconds, one in timed
        if seconds <= near_s or one == climbed[0]
    ]
    fastest, may_go_on = min(ends, key=lambda end: end[0][0])
    while may_go_on:  # the best one ends where nothing around it is better
        fastest, may_go_on = _climbed_by_replays(problem, known, fastest)
    return next(_without_disk(problem, known, fastest), fastest)


def _without_disk(
    problem: Problem, known: Known, fastest: tuple[float, Policy]
) -> Iterator[tuple[float, Policy]]:
    """The same policy with all that lies on disk in main memory instead, if there is room for it
    and that is hardly slower."""
    seconds, policy = fastest
    weights, kv_cache = (
        replace(each, dram=each.dram + each.disk, disk=0.0)
        for each in (policy.weights, policy.kv_cache)
    )
    if (weights, kv_cache) == (policy.weights, policy.kv_cache):
        return
    bare = replace(policy, weights=weights, kv_cache=kv_cache)
    for other in widened(problem, [bare]):
        other_s = known.replayed_s(other)
        if other_s <= seconds * _NEEDS_DISK:
            yield other_s, other


def _climbed_by_replays(
    problem: Problem, known: Known, best: tuple[float, Policy]
) -> tuple[tuple[float, Policy], bool]:
    """Where a climb by replays ends, with its seconds per token, and whether it might go on: with
    more of them, or from where a leap has taken it."""
    if best[1].batching == "static":
        return best, False
    num_replays = num_left = _num_replays(problem, best[1])
    looks = neighbours if problem.ladder.top == "vram" else far_away
    gains, sees_less = num_left > 0, False
    while num_left > 0 and gains:
        others = _promising(problem, known, best[1], looks(problem, best[1]))
        sees_less = num_left < min(len(others), num_replays)  # than a climb that began here
        if len(others) > num_left:
            others = _of_all_sizes(known, others)[:num_left]
        looks = neighbours
        num_left -= len(others)
        fastest = _fastest(known, others, best)
        gains = fastest[0] * _LEAST_SHOWN <= best[0]
        if gains:
            best = fastest
    end = _fastest(known, fewer_pages(problem, best[1]), best)
    far = list(widened(problem, leaps(problem, end[1]))) if num_left > 0 else []
    farther = _fastest(known, far[:num_left], end)
    return farther, gains or sees_less or farther != end


def _num_replays(problem: Problem, policy: Policy) -> int:
    """How many policies may be replayed: fewer where each goes through many passes; where they are
    very few, up to twice as many, since a climb that looks around little ends where it began."""
    count = _MOST_REPLAYED / rough_work(problem.workload, policy)
    return int(max(count, min(2 * count, _SOME_REPLAYS)))


def widened_s(problem: Problem, known: Known, policy: Policy) -> float:
    """Seconds per token of a policy whose cache is as wide as there is room for."""
    widest = with_widest_cache(problem, policy)
    return inf if widest is None else known.replayed_s(widest)


def _climbed(problem: Problem, known: Known, policy: Policy, ends: dict[Policy, Policy]) -> Policy:
    """Where a climb by mean lengths ends, which takes a tenth of the time of one by replays and
    comes nearly as far; the policy itself where its batches are static. `ends` has the ends of all
    that climbs have come through: where one meets another, they go the same way."""
    if policy.batching == "static":
        return policy
    way = list[Policy]()
    while policy not in ends:
        way.append(policy)
        enough_s = known.mean_s(policy) / _LEAST_GAIN
        better = _below(problem, known, enough_s, neighbours(problem, policy))
        policy = better[0] if better else ends.setdefault(policy, policy)
    ends.update(dict.fromkeys(way, ends[policy]))
    return ends[policy]


def _spilled(
    problem: Problem, known: Known, policy: Policy, ends: dict[Policy, Policy]
) -> Iterator[Policy]:
    """Where climbs end that begin with twice the sequences of where the last one did, as long as
    mean lengths say that this is faster. Where experts come from a disk in each pass, that is worth
    a disk for the cache, and no climb leads there: all that a larger batch needs changes at
    once."""
    while True:
        enough_s = known.mean_s(policy) / _WORTH_A_DISK
        better = _below(problem, known, enough_s, with_more_on_disk(problem, policy))
        if not better:
            return
        policy = _climbed(problem, known, better[0], ends)
        yield policy


def _fastest(
    known: Known, others: Iterable[Policy], best: tuple[float, Policy]
) -> tuple[float, Policy]:
    """By replays, of which most are priced in a few loads, which tells neighbours apart well enough
    to know those that are far behind."""
    roughly = {other: known.replayed_s(other, most=_FEWEST_LOADS) for other in others}
    enough_s = _BEHIND * min((known.replayed_s(best[1], most=_FEWEST_LOADS), *roughly.values()))
    near = (other for other, time_s in roughly.items() if time_s <= enough_s)
    return min([best, *((known.replayed_s(one), one) for one in near)], key=lambda pair: pair[0])


def _promising(
    problem: Problem, known: Known, best: Policy, others: Iterable[Policy]
) -> Sequence[Policy]:
    """Those of others, each with the widest cache, that take the least by mean lengths and go
    through other passes, first, and those in fewer rounds or even ones, of which mean lengths say
    less; all where lengths are known, which means say little of."""
    if problem.workload.lengths:
        return widened(problem, chain(others, up_with_fewer_pages(problem, best)))
    others = (other for other in others if other != best)
    best_s = known.mean_s(best)
    near = _below(problem, known, best_s * _PROMISING, others)
    found = _in_other_passes(problem, known, best, near)[:_FEW_REPLAYS]
    rounds = chain(
        in_fewer_rounds(problem, best), in_even_rounds(problem, best), in_even_passes(problem, best)
    )
    fewer = _below(problem, known, best_s * _ROUND_LESS, rounds)
    return each_once(*found, *(other for other in fewer if other != best))


def _in_other_passes(
    problem: Problem, known: Known, best: Policy, others: Iterable[Policy]
) -> list[Policy]:
    """The first of those with passes of their own, of rows that are all alike: through the same
    passes a policy takes as much more or less as mean lengths say."""
    enough_s = known.mean_s(best) / _LEAST_SHOWN
    firsts = {passes_of(problem, best): best}
    for other in others:
        passes = passes_of(problem, other)
        if firsts.get(passes) == best and known.mean_s(other) <= enough_s:
            firsts[passes] = other
        firsts.setdefault(passes, other)
    return [other for other in firsts.values() if other != best]


def _of_all_sizes(known: Known, others: Iterable[Policy]) -> list[Policy]:
    """The most promising of each size of passes, then the second ones, and so on: what mean lengths
    say of passes of one size, and of another, is not equally near to a job."""
    of_size: dict[tuple[int, int], list[Policy]] = {}
    for other in sorted(others, key=known.mean_s):
        of_size.setdefault((other.batch_size, other.tokens_per_pass), []).append(other)
    turns = zip_longest(*of_size.values())
    return [other for turn in turns for other in turn if other is not None]


def _below(
    problem: Problem, known: Known, enough_s: float, others: Iterable[Policy]
) -> list[Policy]:
    """Those that take less than that by mean lengths, with the widest cache, the best first."""
    # No cache is wider than one with all pages, and to find the widest takes longer than this.
    roomy = (one for one in others if known.is_faster(with_all_pages(problem, one), enough_s))
    near = (one for one in widened(problem, roomy) if known.is_faster(one, enough_s))
    return sorted(near, key=known.mean_s)
