"""A policy for reading prompts to their end, where no answer is wanted.

The planner trades prompts against answers in the same pass; here there are prompts only, and what
counts is how many tokens share one walk of the weights.
"""

from collections.abc import Iterator
from dataclasses import replace

from moebatch.layout.footprint import slot_bytes
from moebatch.plan.candidates import FEWEST_SLOTS
from moebatch.plan.planner import best_policy
from moebatch.plan.problem import Problem
from moebatch.plan.refusal import too_large
from moebatch.spec.policy import STREAMING_SLOTS, Placement, Policy, pages_of

_MOST_PASS_TOKENS = 8192
_LEAST_PASS_TOKENS = 64


def reading_policy(problem: Problem) -> Policy:
    """The largest passes that fit, of whole sequences if possible, and as many resident experts as
    then still fit; what the planner knows where none of these does.

    Raises DoesNotFit.
    """
    for policy in _policies(problem):
        if too_large(problem, policy) is None:
            return _with_residents(problem, policy)
    return best_policy(problem).policy


def _policies(problem: Problem) -> Iterator[Policy]:
    """Ever smaller ones."""
    workload, pass_tokens = problem.workload, _MOST_PASS_TOKENS
    mean_pages = pages_of(round(workload.mean_total_tokens))
    while pass_tokens >= _LEAST_PASS_TOKENS:
        seats = max(1, int(pass_tokens / workload.mean_prompt_tokens))
        seats = min(seats, workload.num_sequences or seats)
        streaming = Policy(
            batch_size=seats,
            micro_batch_size=seats,
            tokens_per_pass=pass_tokens,
            num_slots=STREAMING_SLOTS,
            num_kv_pages=max(seats * mean_pages, pages_of(workload.max_total_tokens)),
            weights=Placement(disk=1.0),
        )
        yield replace(streaming, num_slots=0, weights=Placement(dram=1.0))
        yield streaming
        yield replace(streaming, num_slots=FEWEST_SLOTS)
        pass_tokens //= 2


def _with_residents(problem: Problem, policy: Policy) -> Policy:
    """The same with experts that stay in main memory, as far as there is room."""
    if not policy.num_slots:
        return policy
    used = problem.footprints(policy)["dram"].total_bytes
    room = slot_bytes(problem.shape, problem.dtypes)
    # One that streams is left: with none the policy would have been another.
    num_resident = (problem.capacity_bytes("dram") - used) // room
    share = min(num_resident, problem.num_experts - 1) / problem.num_experts
    return replace(policy, weights=Placement(dram=share, disk=1 - share))
