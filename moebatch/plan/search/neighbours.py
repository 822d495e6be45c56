"""Changes to a policy: its neighbours, and others that no climb leads to."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil

from moebatch.layout.scratch import prompt_rows
from moebatch.plan.problem import Problem
from moebatch.plan.replay.phases import phases_of
from moebatch.plan.search.candidates import FEWEST_SLOTS, widest_micro_batch
from moebatch.plan.search.refusal import too_small
from moebatch.plan.search.whole import most_residents, with_rest_below
from moebatch.schedule.registry import traits_of
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import STREAMING_SLOTS, Placement, Policy, pages_of

_LITTLE_MORE = 1.125
_BATCHES = (0.75, 0.875, _LITTLE_MORE, 1.25, 1.5, 2.0)
_TOKENS = (0.5, 0.75, 1.5, 2.0)
_PASSES = ((0.875, 0.5), (1.5, 1.5))
"""Sequences and tokens of smaller and of larger passes: where experts are computed in another way
for fewer rows, or where each of the two needs the other, no climb by one of them leads there."""
_FEWER = (0.5, 0.75)
"""Tokens of a pass that leave room."""
_FEW_PASSES = 8
"""Where prompts that begin together take more, the last of their passes is little of them."""
_FEW_ROUNDS = 8
"""The same of rounds."""
_PAGES = (0.8, 0.9)
"""With less room for sequences that begin, passes may be filled more evenly."""
_SOME_PAGES = 1 / 3
"""Of those that as many of the longest sequences hold: the others leave room to experts."""
_MICRO_BATCHES = (0.5, 2.0)
_RESIDENTS = (-4, -1, 1, 4, 8)
_PARTS = 256
"""More of so many parts of all experts stay: of many, a single one makes no difference."""
_SLOTS = (-2, 1, 2, 4)
_MORE_SLOTS = (2, 3)
"""Times as many: what is read while experts wait for the rest of a layer to be computed."""
_FAR_TOKENS = (0.75, 1.0, 1.25, 1.5, 2.0)
_FARTHEST_TOKENS = 4
"""Between them and those of a policy there may be a number that is worse than both."""
_FAR_SLOTS = (3, 4)


def neighbours(problem: Problem, policy: Policy) -> Iterator[Policy]:
    batch, tokens = policy.batch_size, policy.tokens_per_pass
    most = _largest_batch(problem, policy)
    on_gpu, num_resident = problem.ladder.top == "vram", problem.num_resident(policy)
    step = max(1, problem.num_experts // _PARTS)
    longer = _longer(problem, policy)
    # What buffers of smaller micro-batches leave, a pass of more tokens may need.
    sizes = (
        (other, by)
        for other, by in product((policy, *longer), _MICRO_BATCHES)
        if by > 1 or other.tokens_per_pass > tokens
    )
    # A batch that bounds its micro-batches grows with them.
    both = [round(batch * by) for by in _BATCHES if by > 1 and _bounds_micro_batch(problem, policy)]
    grown = [_with_micro_batch(with_batch(policy, min(size, most)), 2) for size in both]
    larger = each_once(
        *(with_batch(policy, min(round(batch * by), most)) for by in _BATCHES),
        # As many each time, in as many rounds and in one more.
        *(with_batch(policy, ceil(most / (ceil(most / batch) + more))) for more in (0, 1)),
        *longer,
        *(_with_pass(problem, policy, *by) for by in _PASSES),
        *(_with_micro_batch(one, by) for one, by in sizes if on_gpu or problem.schedule),
        *(_wider_than_prompts(policy) if on_gpu else ()),
        *grown,
        # What it needs of a level that is tight, passes of fewer tokens may leave.
        *(_with_tokens(problem, one, round(tokens * _TOKENS[1])) for one in grown[:2]),
    )
    changed = each_once(
        *larger,
        *(_in_one_place(other, level) for other in (policy, *larger) for level in _homes(policy)),
        *(_with_room_used(problem, policy, level) for level in _homes(policy)),
        # What a larger batch needs for its cache, experts that stay may have.
        *(_filled(problem, other) for other in larger),
        # A cache of so much less leaves room that shows; a little less of it may not be worth it.
        _filled(problem, with_batch(policy, batch // 2)),
        # More experts come for a larger batch that leaves fewer of them.
        *(
            _filled(problem, _with_slots(problem, one, _MORE_SLOTS[1] * policy.num_slots))
            for one in (with_batch(policy, min(round(batch * _LITTLE_MORE), most)), *grown[:1])
        ),
        *_with_cache_moved(problem, policy),
        # What a cache leaves that moves, a pass of more tokens may have.
        *(moved for one in longer[-2:] if on_gpu for moved in _with_cache_moved(problem, one)),
        *(_with_residents(problem, policy, num_resident + more * step) for more in _RESIDENTS),
        *(_with_slots(problem, policy, number) for number in _slot_counts(policy.num_slots)),
        # While more tokens are computed more experts come from a disk.
        *(
            _filled(problem, _with_slots(problem, one, 2 * one.num_slots))
            for one in longer[-2:]
            if not on_gpu
        ),
    )
    yield from (other for other in changed if other != policy)


def _longer(problem: Problem, policy: Policy) -> list[Policy]:
    tokens = policy.tokens_per_pass
    return [_with_tokens(problem, policy, round(tokens * by)) for by in _TOKENS]


def far_away(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Neighbours, and policies that no climb leads to: another pass, and nothing stays but what
    slots leave to the cache, which are few, or as many as are never full."""
    yield from neighbours(problem, policy)
    if not policy.num_slots:
        return
    most = min(policy.batch_size * 3 // 2, _largest_batch(problem, policy))
    fuller = with_batch(policy, most)
    for by, num_slots in product(_FAR_TOKENS, (*_FAR_SLOTS, _slots_never_full(problem, policy))):
        tokens = _with_tokens(problem, fuller, round(policy.tokens_per_pass * by)).tokens_per_pass
        other = _with_residents(problem, replace(fuller, num_slots=num_slots), 0)
        if num_slots < problem.num_experts:
            yield replace(other, tokens_per_pass=tokens)


def with_more_on_disk(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Twice the sequences and pages, and twice the tokens or as many; what other levels then have
    no room for of the cache is on the disk. Nothing where none may be there, all has room, or all
    sequences are in work."""
    cache, num_layers = policy.kv_cache, problem.shape.num_keeping_layers
    for other in (_with_pass(problem, policy, 2.0, by) for by in (2.0, 1.0)):
        may_spill = problem.keeps_kv_on_disk and cache.dram and other.batch_size > policy.batch_size
        if may_spill and not problem.fits(with_all_pages(problem, other)):
            grown = other.batch_size / policy.batch_size
            shares = cache.vram, cache.dram
            vram, dram = (int(share * num_layers / grown) / num_layers for share in shares)
            spilled = replace(cache, vram=vram, dram=dram, disk=1 - vram - dram)
            yield _filled(problem, replace(other, kv_cache=spilled))


def in_fewer_rounds(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """All sequences have their turn in one round less, and passes of fewer tokens, or experts that
    go, leave room to their cache. A batch that is larger by less has as many rounds as before, so
    no climb leads here."""
    num_sequences = problem.workload.num_sequences or 0
    num_rounds = ceil(num_sequences / _together(problem, policy))
    if num_rounds > 1:
        enough = ceil(num_sequences / (num_rounds - 1))
        larger = with_batch(policy, max(policy.batch_size, enough))
        filled = _filled(problem, larger)
        yield filled
        if policy.kv_cache.vram and not problem.fits(with_all_pages(problem, filled)):
            grown = enough / _together(problem, policy)
            yield _filled(problem, _with_less_on_gpu(problem, larger, grown))
        yield from (
            _with_tokens(problem, larger, round(larger.tokens_per_pass * by)) for by in _FEWER
        )


def _with_less_on_gpu(problem: Problem, policy: Policy, grown: float) -> Policy:
    """As much of a cache that has grown so many times as there was before; the rest is below."""
    cache, num_layers = policy.kv_cache, problem.shape.num_keeping_layers
    vram = int(cache.vram * num_layers / grown) / num_layers
    return replace(policy, kv_cache=replace(cache, vram=vram, dram=1 - vram - cache.disk))


def in_even_rounds(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Few rounds have as many sequences each, where the last one had the little that was left, in
    passes of fewer tokens."""
    num_sequences = problem.workload.num_sequences or 0
    num_rounds = ceil(num_sequences / _together(problem, policy))
    if 1 < num_rounds <= _FEW_ROUNDS:
        even = with_batch(policy, ceil(num_sequences / num_rounds))
        if even.batch_size < policy.batch_size:
            yield _with_tokens(problem, even, round(policy.tokens_per_pass * _FEWER[0]))


def in_even_passes(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Prompts that begin together fill all of their few passes alike, where the last one had the
    little that was left, of which mean lengths know nothing; or one pass, to which no climb leads
    where two take no less than three."""
    prompt, together = problem.workload.mean_own_tokens, _together(problem, policy)
    num_passes = ceil(together * prompt / policy.tokens_per_pass)
    if 1 < num_passes <= _FEW_PASSES:
        yield _with_tokens(problem, policy, ceil(together * prompt))
        decoding = together * (num_passes - 1) / 2  # of those that the passes before have admitted
        even = (together * prompt + decoding) / num_passes + prompt
        if even < policy.tokens_per_pass:
            yield _with_tokens(problem, policy, ceil(even))
    elif num_passes == 1 and problem.ladder.top == "vram":
        # They all decode in the next one, and not half of them.
        yield _with_micro_batch(policy, 2)


def up_with_fewer_pages(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """A cache that the GPU attends to below it comes up with some of its pages, and experts have
    the room of the others. Mean lengths say too much of it, and lead astray."""
    if policy.attention_on_gpu and not policy.kv_cache.vram:
        yield _filled(problem, _in_one_place(policy, "vram"), of_pages=_SOME_PAGES)


def leaps(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Far from where a climb without a GPU has ended, past policies that are worse than both."""
    if problem.ladder.top == "dram" and policy.num_slots:
        tokens = _FARTHEST_TOKENS * policy.tokens_per_pass
        yield _filled(problem, _with_tokens(problem, policy, tokens))
        yield from (
            _with_all_in_slots(problem, one)
            for one in each_once(*_longer(problem, policy), *_with_cache_moved(problem, policy))
        )


def fewer_pages(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """Nothing where all sequences are alike."""
    for by in _PAGES if problem.workload.lengths else ():
        fewer = replace(policy, num_kv_pages=max(1, round(policy.num_kv_pages * by)))
        if too_small(problem, fewer) is None:
            yield fewer


def passes_of(problem: Problem, policy: Policy) -> tuple[int, int]:
    """Rounds of sequences, all alike, that begin together, and tokens of a pass: policies with as
    many of both go through much the same passes."""
    together = _together(problem, policy)
    num_sequences = problem.workload.num_sequences
    return ceil(num_sequences / together) if num_sequences else together, policy.tokens_per_pass


def _together(problem: Problem, policy: Policy) -> int:
    """Sequences, all alike, that begin together: they end together, with all pages that they ever
    have."""
    workload = problem.workload
    own = min(workload.mean_total_tokens - workload.mean_shared_tokens, workload.most_cached)
    return min(policy.batch_size, max(1, policy.num_kv_pages // pages_of(ceil(own))))


def _largest_batch(problem: Problem, policy: Policy) -> int:
    return problem.workload.num_sequences or policy.batch_size * 2


def with_batch(policy: Policy, batch_size: int) -> Policy:
    batch_size = max(1, batch_size)
    tokens = max(policy.tokens_per_pass, batch_size)
    most = widest_micro_batch(traits_of(policy), batch_size)
    micro_batch = min(policy.micro_batch_size, most)
    return replace(
        policy, batch_size=batch_size, tokens_per_pass=tokens, micro_batch_size=micro_batch
    )


def _with_tokens(problem: Problem, policy: Policy, tokens: int) -> Policy:
    most = max(problem.most_worth_risking, policy.tokens_per_pass)
    most = min(most, problem.workload.most_pass_tokens)
    least = max(policy.batch_size, problem.workload.fewest_pass_tokens)
    return replace(policy, tokens_per_pass=max(least, min(tokens, most)))


def _with_pass(problem: Problem, policy: Policy, by: float, of_tokens: float) -> Policy:
    """So many times the sequences, and the tokens of a pass."""
    batch_size = min(round(policy.batch_size * by), _largest_batch(problem, policy))
    tokens = round(policy.tokens_per_pass * of_tokens)
    return _with_tokens(problem, with_batch(policy, batch_size), tokens)


def _with_micro_batch(policy: Policy, by: float) -> Policy:
    size = round(policy.micro_batch_size * by)
    most = widest_micro_batch(traits_of(policy), policy.batch_size)
    return replace(policy, micro_batch_size=max(1, min(size, most)))


def _wider_than_prompts(policy: Policy) -> Iterator[Policy]:
    """Up to the rows that prompts have on any GPU, wider micro-batches do not make theirs wider."""
    rows = prompt_rows(policy, "vram")
    widest = widest_micro_batch(traits_of(policy), policy.batch_size)
    if policy.micro_batch_size < rows < widest:
        yield replace(policy, micro_batch_size=min(2 * rows, widest))


def _bounds_micro_batch(problem: Problem, policy: Policy) -> bool:
    widest = widest_micro_batch(traits_of(policy), policy.batch_size)
    return policy.micro_batch_size == widest and problem.ladder.top == "vram"


def _homes(policy: Policy) -> tuple[LevelName, ...]:
    """Levels that share the cache of keys and values; none where one has all of it."""
    homes: tuple[LevelName, ...] = ("vram", "dram", "disk")
    shared = tuple(level for level in homes if policy.kv_cache.on(level))
    return shared if len(shared) > 1 else ()


def _in_one_place(policy: Policy, level: LevelName) -> Policy:
    return replace(policy, kv_cache=Placement(**{level: 1.0}))


def _with_cache_moved(problem: Problem, policy: Policy) -> Iterator[Policy]:
    """The other processor attends, to a cache below the GPU; or the GPU still does, or to one that
    comes up. Without a GPU, a cache that is all in one place is in the other."""
    cache = policy.kv_cache
    if problem.ladder.top == "vram":
        below = replace(policy, kv_cache=replace(cache, vram=0.0, dram=cache.vram + cache.dram))
        is_open = traits_of(policy).attention is None
        if is_open and problem.shape.attends_beside_gpu:
            other = replace(below, attention_on_gpu=not policy.attention_on_gpu)
            yield _filled(problem, other) if cache.vram else other
        if cache.vram == 1:
            yield _filled(problem, below)
        elif not cache.vram and (is_open or policy.attention_on_gpu):
            above = replace(policy, attention_on_gpu=True)
            yield _filled(problem, _in_one_place(above, "vram"))
    elif problem.keeps_kv_on_disk and not _homes(policy):
        yield _filled(problem, _in_one_place(policy, "disk" if cache.dram else "dram"))


def _with_room_used(problem: Problem, policy: Policy, level: LevelName) -> Policy:
    """The cache at one level, and what it leaves elsewhere for experts: slots that are never full
    where a disk fills them, and others that stay."""
    moved = _in_one_place(policy, level)
    if not policy.num_slots or problem.ladder.top == "vram":
        return _filled(problem, moved)
    num_slots = _slots_never_full(problem, moved)
    if num_slots >= problem.num_experts:
        return _filled(problem, moved)
    return _filled(problem, _with_residents(problem, replace(moved, num_slots=num_slots), 0))


def _slot_counts(num_slots: int) -> Iterator[int]:
    """Some more or fewer, times as many or half, and as many as are enough on most machines: beside
    attention on a CPU a candidate has those of a whole layer."""
    yield from (num_slots + more for more in _SLOTS)
    yield from (num_slots * by for by in _MORE_SLOTS)
    yield from (max(STREAMING_SLOTS, num_slots // 2), STREAMING_SLOTS)


def _slots_never_full(problem: Problem, policy: Policy) -> int:
    """In passes of which there are most; two at least, as anywhere."""
    usual = max(phases_of(problem.workload, policy.room), key=lambda phase: phase.num_passes)
    return max(FEWEST_SLOTS, problem.cost_of(usual.load, policy).slots_never_full)


def _with_residents(problem: Problem, policy: Policy, num_resident: int) -> Policy:
    """And as many of the others in main memory as have room there; unchanged where experts do not
    stream, or no such number can stay."""
    most = problem.num_experts - policy.num_slots
    if not policy.num_slots or not 0 <= num_resident <= most:
        return policy
    other = problem.with_residents(policy, num_resident)
    if traits_of(policy).is_paged:
        other = replace(other, num_slots=problem.placed(other).slots_wanted)
    return with_rest_below(problem, other)


def _filled(problem: Problem, policy: Policy, *, of_pages: float = 1.0) -> Policy:
    """As many experts stay as have room beside the largest cache that the batch can use, or beside
    some of its pages."""
    roomy = with_all_pages(problem, policy)
    some = max(problem.fewest_pages, round(of_pages * roomy.num_kv_pages))
    roomy = replace(roomy, num_kv_pages=some)
    most = min(most_residents(problem, roomy), problem.num_experts - policy.num_slots)
    filled = _with_residents(problem, roomy, max(0, most))
    return replace(filled, num_kv_pages=policy.num_kv_pages)


def _with_slots(problem: Problem, policy: Policy, num_slots: int) -> Policy:
    """One more or fewer stay for every slot, as far as there are any; unchanged where experts do
    not stream one by one, or there would be too few slots or too many."""
    staying = max(0, problem.num_resident(policy) - (num_slots - policy.num_slots))
    is_fixed = not policy.num_slots or traits_of(policy).is_paged
    if is_fixed or not FEWEST_SLOTS <= num_slots < problem.num_experts:
        return policy
    return _with_residents(problem, replace(policy, num_slots=num_slots), staying)


def _with_all_in_slots(problem: Problem, policy: Policy) -> Policy:
    """Nothing stays, and slots have all the room that passes of so many tokens leave."""
    few = _filled(problem, _with_slots(problem, policy, FEWEST_SLOTS))
    return _with_slots(problem, few, few.num_slots + problem.num_resident(few))


def with_all_pages(problem: Problem, policy: Policy) -> Policy:
    """As many as the batch can use, whether they fit or not."""
    most = problem.most_pages(policy.batch_size)
    return policy if policy.num_kv_pages == most else replace(policy, num_kv_pages=most)


def each_once(*policies: Policy) -> list[Policy]:
    return [*dict.fromkeys(policies)]
