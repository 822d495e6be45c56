"""A job as a few kinds of passes: how many of each, and what each has to do.

An approximation of the passes that `Admission` decides on, for the planner's objective: hundreds of
candidates are weighed, and a replay of one takes a tenth of a second. All sequences are as long as
the mean (but for the longest answer, with which a job ends), places and tokens are divisible, and
sequences begin evenly, so that all pages are as full as those of a mean sequence. With N places and
T tokens a pass, prompts of s tokens and answers of g:
while places are being filled, passes are full; then they decode; as sequences end, their places are
filled by full passes again. The chosen policy is replayed pass by pass (`plan/replay/passes.py`).
"""

from math import ceil, inf
from statistics import mean
from typing import NamedTuple

from moebatch.layout.admission import AHEAD_TOKENS
from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import PROMPT_ROWS
from moebatch.spec.policy.policy import PAGE_TOKENS, pages_of
from moebatch.spec.workload import Workload

_FEW_WAVES = 4
"""After more of them the last one, of fewer sequences, counts for little."""


class Phase(NamedTuple):
    """Passes that are alike."""

    num_passes: float
    """Per sequence of the job."""
    load: PassLoad


def phases_of(workload: Workload, room: tuple[int, int, int]) -> tuple[Phase, ...]:
    """Full and decoding passes of a job under mixed batching, per sequence, in a policy's room.

    A job without a number of sequences has neither a beginning nor an end.
    """
    total = workload.num_sequences
    prompt, steps = workload.mean_own_tokens, _steps(workload, workload.mean_new_tokens)
    batch_size, tokens, pages = room
    places = min(batch_size, total or inf, sequences_held(workload, pages))
    waves, in_full, filling = _filled(workload, places, tokens)
    if filling < steps and _ends_together(workload):
        places = min(places, sequences_held(workload, pages, within=filling))
        waves, in_full, filling = _filled(workload, places, tokens)
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
        # Only places that have a last turn are waited for, and those are filled first.
        last = _last_share(workload, waves)
        rest = max(_waves_passes(workload, waves) + last * at_start, in_places) - num_full
        left, at_end, ending = waves * places * steps - num_full * in_full, 0.0, 0.0
        if last < 1 and waves < _FEW_WAVES:  # others have ended, and in their places none begins
            at_end = steps - (1 - last) * at_start
            ending = last * places * (1 - last * at_start / at_end / 2)
        rest, left = rest - at_end, left - at_end * ending
        decoding = min(max(1.0, left / max(rest, 1e-9)), places)
        phases = [
            Phase(num_passes=num_full, load=_load(workload, in_full, prompts)),
            Phase(num_passes=rest, load=_load(workload, decoding, 0.0)),
            Phase(num_passes=at_end, load=_load(workload, ending, 0.0)),
        ]
    sequences = waves * places
    return tuple(
        Phase(num_passes=phase.num_passes / sequences, load=phase.load)
        for phase in phases
        if phase.num_passes > 0
    )


def _filled(workload: Workload, places: float, tokens: int) -> tuple[float, float, float]:
    """How often so many places are filled, sequences in them that decode in a full pass, and the
    passes that it takes to fill them."""
    total = workload.num_sequences
    waves = 1.0 if total is None else max(1.0, total / places)
    # While places are filled for the first time half of them decode; later, nearly all.
    in_full = places * (1.0 if total is None else 1 - 0.5 / waves)
    return waves, in_full, places * workload.mean_own_tokens / max(1.0, tokens - in_full)


def sequences_held(workload: Workload, pages: int, *, within: float | None = None) -> float:
    """Sequences in the middle of their answers that so many pages hold, half of a last page
    counted; what they share is held once. All of it where sequences are alike and so near to each
    other that they hardly begin a page.

    Those that begin `within` so few passes are at the end of their answers, as many passes before
    it, all at once.
    """
    shared = workload.mean_shared_tokens
    context = workload.decode_context
    if within is not None:
        context += max(0.0, workload.mean_new_tokens - within) / 2
    held = min(context - shared, workload.most_cached)
    in_the_end = min(workload.mean_total_tokens - shared, workload.most_cached)
    each = min(held / PAGE_TOKENS + 0.5, pages_of(ceil(in_the_end)))
    apart = workload.mean_new_tokens if within is None else min(within, workload.mean_new_tokens)
    if not workload.lengths and apart < PAGE_TOKENS:
        last = ceil(workload.mean_own_tokens) + ceil(workload.mean_new_tokens)
        ends = range(last - max(1, ceil(apart)) + 1, last + 1)
        each = mean(pages_of(min(end, workload.most_cached)) for end in ends)
    return max(1.0, (pages - shared / PAGE_TOKENS) / each)


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
    return ceil(waves) if _ends_together(workload) else waves


def _ends_together(workload: Workload) -> bool:
    """Whether answers that begin together end together, in a job that ends."""
    is_even = workload.longest_answer <= workload.mean_new_tokens
    return is_even and workload.num_sequences is not None


def _last_share(workload: Workload, waves: float) -> float:
    """Share of the places that are taken in the last turn: all, unless sequences are alike and are
    not as many as whole turns have."""
    return 1 - ceil(waves) + waves if _ends_together(workload) else 1.0


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
    begun = prompts / max(1.0, own)
    if workload.is_encoded:
        return PassLoad(
            decode_sequences=decoding,
            decode_positions=decoding * (own + new / 2),
            prompt_tokens=prompts,
            prompt_pairs=prompts * own,
            prompt_slices=begun,
            logits_rows=decoding,
        )
    read_again = max(0.0, own / PROMPT_ROWS - 1) / 2
    cut = min(1.0, prompts)  # the last one in a pass goes on in the next
    return PassLoad(
        decode_sequences=decoding,
        decode_positions=decoding * (own + shared + new / 2),
        prompt_tokens=prompts,
        prompt_pairs=prompts * (shared + (own + 1) / 2),
        prompt_context=prompts * (read_again + shared / max(1.0, min(own, PROMPT_ROWS))),
        prompt_slices=begun + cut,
        resumed_slices=(begun if shared else 0.0) + cut,
        logits_rows=decoding + begun,
    )
