"""A policy tried on the job itself, pass by pass, beside its neighbours.

The planner's objective knows mean lengths only, and its batches are two to a doubling. How many
sequences of different lengths share a cache, and how long the last ones take, shows in a replay.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from moebatch.plan.candidates import FEWEST_SLOTS
from moebatch.plan.prediction import predict
from moebatch.plan.problem import Problem
from moebatch.plan.refusal import too_large, too_small
from moebatch.plan.replay import num_replayed
from moebatch.spec.policy import Placement, Policy, pages_of

_MOST_REPLAYED = 2**17
"""Sequences that are replayed in all: a second or two."""
_LEAST_GAIN = 1.005
"""What is less than that is not worth a round."""
_SEATS = (0.75, 1.25, 1.5, 2.0)
_TOKENS = (0.5, 0.75, 1.5, 2.0)
_RESIDENTS = (-4, -2, -1, 1, 2, 4)
_SLOTS = (-2, -1, 1, 2, 4)
_FAR_TOKENS = (0.75, 1.0, 1.25, 1.5, 2.0)
_FAR_SLOTS = (3, 4)


def refined(problem: Problem, policy: Policy) -> Policy:
    """The best policy that is found by climbing from this one: seats, tokens of a pass, experts
    that stay, slots; the cache of keys and values gets what is left of main memory.

    Only in main memory, and only where the lengths of a job's sequences are known.
    """
    if problem.with_vram or not problem.workload.lengths or policy.kv_cache.disk:
        return policy
    best, best_s = policy, _seconds(problem, policy)
    num_left = _MOST_REPLAYED // num_replayed(problem.workload, policy)
    looks = _far_away
    while num_left > 0:
        others = list(islice(looks(problem, best), num_left))
        looks = _neighbours
        num_left -= len(others)
        tried = [(_seconds(problem, other), other) for other in others]
        fastest_s, fastest = min(tried, key=lambda pair: pair[0], default=(best_s, best))
        if fastest_s * _LEAST_GAIN > best_s:
            break
        best, best_s = fastest, fastest_s
    return best


def _seconds(problem: Problem, policy: Policy) -> float:
    """Of the job, or of a token in the middle of an endless one."""
    prediction = predict(problem, policy)
    return prediction.job_time_s or 1 / prediction.tokens_per_s


def _far_away(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Neighbours, and policies that no climb leads to: another pass, and nothing stays but what a
    few slots leave to the cache."""
    yield from _neighbours(problem, policy)
    fuller = _with_seats(policy, min(policy.batch_size * 3 // 2, _most_seats(problem, policy)))
    for by, num_slots in product(_FAR_TOKENS, _FAR_SLOTS):
        tokens = max(round(policy.tokens_per_pass * by), fuller.batch_size)
        other = _with_residents(problem, replace(fuller, num_slots=num_slots), 0)
        if policy.num_slots and num_slots < problem.num_experts:
            yield from _widest(problem, replace(other, tokens_per_pass=tokens))


def _neighbours(problem: Problem, policy: Policy) -> Iterator[Policy]:
    seats, tokens = policy.batch_size, policy.tokens_per_pass
    most_seats = _most_seats(problem, policy)
    num_resident = round(policy.weights.dram * problem.num_experts)
    larger = [
        *(_with_seats(policy, min(round(seats * by), most_seats)) for by in _SEATS),
        *(replace(policy, tokens_per_pass=max(round(tokens * by), seats)) for by in _TOKENS),
    ]
    changed = [
        *larger,
        # What a larger batch needs for its cache, experts that stay may have.
        *(_with_residents(problem, other, 0) for other in larger),
        *(_with_residents(problem, policy, num_resident + more) for more in _RESIDENTS),
        *(_with_slots(problem, policy, policy.num_slots + more) for more in _SLOTS),
    ]
    for other in dict.fromkeys(other for other in changed if other != policy):
        yield from _widest(problem, other)


def _widest(problem: Problem, policy: Policy) -> Iterator[Policy]:
    widest = _with_widest_cache(problem, policy)
    if widest is not None:
        yield widest


def _most_seats(problem: Problem, policy: Policy) -> int:
    return problem.workload.num_sequences or policy.batch_size * 2


def _with_seats(policy: Policy, seats: int) -> Policy:
    seats = max(1, seats)
    tokens = max(policy.tokens_per_pass, seats)
    micro_batch = min(policy.micro_batch_size, seats)
    return replace(policy, batch_size=seats, tokens_per_pass=tokens, micro_batch_size=micro_batch)


def _with_residents(problem: Problem, policy: Policy, num_resident: int) -> Policy:
    """Unchanged where experts do not stream, or no such number can stay."""
    most = problem.num_experts - policy.num_slots
    if not policy.num_slots or not 0 <= num_resident <= most:
        return policy
    share = num_resident / problem.num_experts
    return replace(policy, weights=Placement(dram=share, disk=1 - share))


def _with_slots(problem: Problem, policy: Policy, num_slots: int) -> Policy:
    """One more or fewer stay for every slot, as far as there are any; unchanged where experts do
    not stream, or there would be too few slots or too many."""
    num_resident = round(policy.weights.dram * problem.num_experts)
    staying = max(0, num_resident - (num_slots - policy.num_slots))
    if not policy.num_slots or not FEWEST_SLOTS <= num_slots < problem.num_experts:
        return policy
    return _with_residents(problem, replace(policy, num_slots=num_slots), staying)


def _with_widest_cache(problem: Problem, policy: Policy) -> Policy | None:
    """As many pages as fit, and no more than the seats can use; None if too few fit."""
    least, most = 0, policy.batch_size * pages_of(problem.workload.max_total_tokens)
    while least < most:
        tried = (least + most + 1) // 2
        if too_large(problem, replace(policy, num_kv_pages=tried)) is None:
            least = tried
        else:
            most = tried - 1
    widest = replace(policy, num_kv_pages=max(1, least))
    return widest if least and too_small(problem, widest) is None else None
