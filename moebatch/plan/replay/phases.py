"""A job as a few kinds of passes: how many of each, and what each has to do.

An approximation of the passes that `Admission` decides on, for the planner's objective: hundreds of
candidates are weighed, and a replay of one takes a tenth of a second. All sequences are as long as
the mean (but for the longest answer, with which a job ends), places and tokens are divisible, and
sequences begin evenly, so that all pages are as full as those of a mean sequence. With N places and
T tokens a pass, prompts of s tokens and answers of g:
while places are being filled, passes are full; then they decode; as sequences end, their places are
filled by full passes again. The chosen policy is replayed pass by pass (`plan/replay/passes.py`).
"""

from math import ceil
from statistics import mean
from typing import NamedTuple

from moebatch.layout.admission import AHEAD_TOKENS
from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import PROMPT_ROWS
from moebatch.spec.policy.policy import PAGE_TOKENS, Policy, pages_of
from moebatch.spec.workload import Workload


class Phase(NamedTuple):
    """Passes that are alike."""

    num_passes: float
    """Per sequence of the job."""
    load: PassLoad


def phases_of(workload: Workload, policy: Policy) -> tuple[Phase, ...]:
    """Full and decoding passes of a job under mixed batching, per sequence.

    A job without a number of sequences has neither a beginning nor an end.
    """
    total = workload.num_sequences
    prompt, steps = workload.mean_own_tokens, _steps(workload, workload.mean_new_tokens)
    tokens = policy.tokens_per_pass
    places = min(policy.batch_size, sequences_held(workload, policy))
    places = places if total is None else min(places, total)
    waves = 1.0 if total is None else max(1.0, total / places)
    # While places are filled for the first time half of them decode; later, nearly all.
    in_full = places * (1.0 if total is None else 1 - 0.5 / waves)
    filling = places * prompt / max(1.0, tokens - in_full)
    # A job has whole passes, however little there is to take in.
    at_start = 0.0 if total is None else max(1.0, filling)
    # A place is free for the next sequence in the pass after the last one of an answer.
    in_places = 0.0 if total is None else _turns(workload, waves) * (1 + steps)
    if filling >= steps:  # prompts never stop coming in: every pass is full
        decoding = min(tokens * steps / (steps + prompt), places)
        at_end = 0.0 if total is None else _passes_at_end(workload, total, waves * filling)
        in_all = waves * places * (prompt + steps) - at_end * decoding / 2
        least = 0.0 if total is None else max(1.0, in_places - at_end)
        num_full = max(least, in_all / tokens)
        full = in_all / num_full
        prompts = min(full, waves * places * prompt / num_full)
        phases = [
            Phase(num_passes=num_full, load=_load(workload, full - prompts, prompts)),
            Phase(num_passes=at_end, load=_load(workload, decoding / 2, 0.0)),
        ]
    else:
        num_full = waves * filling if total is None else max(1.0, waves * filling)
        prompts = waves * places * prompt / num_full
        rest = max(_waves_passes(workload, waves) + at_start, in_places) - num_full
        decoding = max(1.0, (waves * places * steps - num_full * in_full) / max(rest, 1e-9))
        phases = [
            Phase(num_passes=num_full, load=_load(workload, in_full, prompts)),
            Phase(num_passes=rest, load=_load(workload, min(decoding, places), 0.0)),
        ]
    sequences = waves * places
    return tuple(
        Phase(num_passes=phase.num_passes / sequences, load=phase.load)
        for phase in phases
        if phase.num_passes > 0
    )


def sequences_held(workload: Workload, policy: Policy) -> float:
    """Sequences in the middle of their answers that the pages of a policy hold, half of a last page
    counted; what they share is held once. All of them where sequences are alike and answers so
    short that they hardly begin a page."""
    shared = workload.mean_shared_tokens
    held = min(workload.decode_context - shared, workload.most_cached)
    each = held / PAGE_TOKENS + 0.5
    if not workload.lengths and workload.mean_new_tokens < PAGE_TOKENS:
        own = ceil(workload.mean_own_tokens)
        ends = range(own + 1, own + ceil(workload.mean_new_tokens) + 1)
        each = mean(pages_of(min(end, workload.most_cached)) for end in ends)
    return max(1.0, (policy.num_kv_pages - shared / PAGE_TOKENS) / each)


def _passes_at_end(workload: Workload, total: int, filling: float) -> float:
    """Passes after the last prompt, where prompts come in all the time, for `filling` passes. Of
    the rows that are looked ahead the longest begin first: the last of them before other prompts.
    """
    steps = _steps(workload, workload.mean_new_tokens)
    ahead = min(1.0, AHEAD_TOKENS / (total * workload.mean_prompt_tokens))
    return max(steps, _steps(workload, workload.longest_answer) - ahead * filling)


def _waves_passes(workload: Workload, waves: float) -> float:
    """Passes in which answers go on; their first tokens come with their prompts.

    Answers of several lengths end at about the same time, since the longest ones begin first.
    """
    in_turns = _turns(workload, waves) * _steps(workload, workload.mean_new_tokens)
    if workload.num_sequences is None:
        return in_turns
    return max(in_turns, _steps(workload, workload.longest_answer))


def _turns(workload: Workload, waves: float) -> float:
    """Sequences that have each place, one after the other. Answers of one length end together, so
    the last wave takes as long as any; otherwise places are refilled one by one."""
    is_even = workload.longest_answer <= workload.mean_new_tokens
    return ceil(waves) if is_even and workload.num_sequences is not None else waves


def _steps(workload: Workload, new_tokens: float) -> float:
    """Passes in which a sequence decodes: the first token of an answer comes with its prompt,
    unless that is encoded."""
    return max(0.0, new_tokens - (not workload.is_encoded))


def _load(workload: Workload, decoding: float, prompts: float) -> PassLoad:
    own, shared, new = (
        workload.mean_own_tokens,
        workload.mean_shared_tokens,
        workload.mean_new_tokens,
    )
    if workload.is_encoded:
        return PassLoad(
            decode_sequences=decoding,
            decode_positions=decoding * (own + new / 2),
            prompt_tokens=prompts,
            prompt_pairs=prompts * own,
            logits_rows=decoding,
        )
    read_again = max(0.0, own / PROMPT_ROWS - 1) / 2
    return PassLoad(
        decode_sequences=decoding,
        decode_positions=decoding * (own + shared + new / 2),
        prompt_tokens=prompts,
        prompt_pairs=prompts * (shared + (own + 1) / 2),
        prompt_context=prompts * (read_again + shared / max(1.0, min(own, PROMPT_ROWS))),
        logits_rows=decoding + prompts / max(1.0, own),
    )
