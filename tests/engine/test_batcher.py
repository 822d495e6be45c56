"""Passes are filled, nobody starves, and the cache is never overdrawn."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.engine.batcher import Batcher, Slice
from moebatch.engine.sequence import Sequence
from moebatch.engine.text import AnswerText
from moebatch.layout.admission import Caps
from moebatch.plan.replay.passes import job_passes
from moebatch.spec.model import cache_layout
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout, SinkWindow
from moebatch.spec.policy.policy import Batching, Placement, Policy, pages_of
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Length, Workload
from moebatch.store.kv.cache import KVCache


class NoText:
    """Nobody asks for text here."""

    def decode(self, tokens: object) -> str:
        raise AssertionError("not needed")


@dataclass(frozen=True)
class Work:
    """A sequence to come: prompt, most new tokens, and those it will really have."""

    prompt: int
    limit: int
    answer: int

    def sequence(self, index: int) -> Sequence:
        sampling = Sampling(max_tokens=self.limit)
        request = Request(
            index=index,
            custom_id=str(index),
            prompt_tokens=tuple(range(self.prompt)),
            sampling=sampling,
        )
        return Sequence(request, 0, AnswerText(NoText(), sampling))


works = st.builds(
    lambda prompt, limit, share: Work(prompt, limit, 1 + int(share * (limit - 1))),
    st.integers(1, 60),
    st.integers(1, 40),
    st.floats(0, 1),
)


HEADS = CacheLayout.of_heads(1, 1)
WHOLE = CacheGroup(layers=(0,), layout=HEADS)
RING = CacheGroup(layers=(1,), layout=HEADS, sink_window=SinkWindow(0, 17))
SINKS = CacheGroup(layers=(0,), layout=HEADS, sink_window=SinkWindow(3, 40))
STATE = CacheGroup(layers=(2,), layout=HEADS, is_state=True)
groups = st.sampled_from(((WHOLE,), (WHOLE, RING, STATE), (SINKS, RING, STATE)))
"""Models that keep all of a sequence somewhere, and those that do not."""


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    """So that rings are smaller than sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_layout, "LARGEST_SLICE", 4)
        yield


def make(
    work: list[Work],
    num_pages: int,
    tokens_per_pass: int,
    batch_size: int,
    batching: Batching = "mixed",
    *,
    shares: bool = False,
    groups: tuple[CacheGroup, ...] = (WHOLE,),
) -> Batcher:
    policy = Policy(
        batch_size=batch_size,
        micro_batch_size=4,
        tokens_per_pass=tokens_per_pass,
        num_slots=1,
        weights=Placement(disk=1),
        num_kv_pages=num_pages,
        batching=batching,
    )
    cache = KVCache(
        groups,
        num_pages=[group.num_pages(policy) for group in groups],
        dtype=torch.float32,
        shares=shares,
    )
    return Batcher((w.sequence(i) for i, w in enumerate(work)), cache, policy)


def run_pass(batcher: Batcher, work: list[Work]) -> list[tuple[int, int]]:
    """Computes one pass; (sequence, tokens) of its slices."""
    slices = batcher.next_pass()
    done = [(s.sequence.request.index, s.num_tokens) for s in slices]
    for piece in slices:
        sequence = piece.sequence
        rows = batcher._cache.rows(sequence, piece.context)
        num_kept = batcher._cache.groups[0].num_rows(piece.context)
        assert len(rows) == num_kept, "a slice needs pages for all that it sees"
        tokens = sequence.pending_tokens(piece.num_tokens)
        assert len(tokens) == piece.num_tokens > 0
        sequence.num_cached += piece.num_tokens
        if sequence.num_pending == 0:
            sequence.output_tokens.append(1000 + len(sequence.output_tokens))
            if len(sequence.output_tokens) == work[sequence.request.index].answer:
                batcher.retire(sequence)
    batcher._cache.check_integrity()
    return done


@given(
    work=st.lists(works, max_size=30),
    extra_pages=st.integers(0, 20),
    tokens_per_pass=st.integers(1, 50),
    batch_size=st.integers(1, 12),
    groups=groups,
)
def test_everything_ends_and_no_pass_is_too_large(
    work: list[Work],
    extra_pages: int,
    tokens_per_pass: int,
    batch_size: int,
    groups: tuple[CacheGroup, ...],
) -> None:
    """And no group runs short of pages."""
    tokens_per_pass = max(tokens_per_pass, batch_size)
    longest = max((groups[0].pages_of(w.prompt + w.limit) for w in work), default=1)
    batcher = make(work, longest + extra_pages, tokens_per_pass, batch_size, groups=groups)
    for _ in range(5000):
        done = run_pass(batcher, work)
        assert sum(tokens for _, tokens in done) <= tokens_per_pass
        assert len(done) <= batch_size
        if not done:
            break
    assert not batcher.running
    assert batcher._cache.first.num_free == batcher._cache.first.num_pages


@given(
    work=st.lists(works, max_size=30),
    extra_pages=st.integers(0, 20),
    tokens_per_pass=st.integers(1, 50),
    batch_size=st.integers(1, 12),
    batching=st.sampled_from(("mixed", "static")),
    groups=groups,
)
def test_when_nobody_waits_the_pages_that_are_left_suffice_to_the_end(
    work: list[Work],
    extra_pages: int,
    tokens_per_pass: int,
    batch_size: int,
    batching: Batching,
    groups: tuple[CacheGroup, ...],
) -> None:
    tokens_per_pass = max(tokens_per_pass, batch_size)
    longest = max((groups[0].pages_of(w.prompt + w.limit) for w in work), default=1)
    batcher = make(
        work, longest + extra_pages, tokens_per_pass, batch_size, batching, groups=groups
    )
    num_preempted = None
    while run_pass(batcher, work):
        rest = batcher.rest()
        # A sequence that came in while prompts took many passes may be sent back: nothing shrinks.
        if rest is not None and rest.num_pages <= batcher._cache.first.num_pages:
            if num_preempted is None:
                num_preempted = batcher.num_preempted
            batcher._cache.give_back(rest.num_pages)
        if num_preempted is not None:
            assert batcher.num_preempted == num_preempted
            assert rest is not None or not batcher.running, "nobody can come any more"
    assert not batcher.running


def compute(cache: KVCache, piece: Slice, *, works: bool) -> None:
    """Writes what each new token stands for, a few at a time, where layers look for it, and reads
    what is there of all that it sees. Where it fails, nothing can be said of what is there."""
    sequence, num_prompt = piece.sequence, piece.sequence.num_prompt_tokens
    assert len(sequence.pending_tokens(piece.num_tokens)) == piece.num_tokens
    own = 1000.0 * (1 + sequence.request.index)
    for number, group in enumerate(cache.groups):
        stored = cache.tensors("dram", group.layers[0], 0).parts[0].flatten(1)[:, 0]
        for first in range(sequence.num_cached, piece.context, cache_layout.LARGEST_SLICE):
            stop = min(first + cache_layout.LARGEST_SLICE, piece.context)
            rows = torch.from_numpy(cache.rows(sequence, stop, first, group=number))
            if group.is_state:  # it has taken in all tokens before, and no others
                assert not works or not first or stored[rows].tolist() == [own + first]
                stored[rows] = own + stop if works else -1.0
                continue
            places = torch.arange(stop - len(rows), stop)
            expected = places + torch.where(places < num_prompt, 0.0, own)
            stored[rows[first - stop :]] = expected[first - stop :] if works else -1.0
            if works:
                assert torch.equal(stored[rows], expected), "it sees what is not its own"


@given(
    work=st.lists(works, min_size=1, max_size=12),
    extra_pages=st.integers(0, 9),
    tokens_per_pass=st.integers(1, 50),
    batch_size=st.integers(1, 12),
    groups=st.sampled_from(((WHOLE,), (WHOLE, RING, STATE))),
    failures=st.dictionaries(st.integers(0, 9), st.sampled_from((None, 0, 1, 3)), min_size=1),
)
def test_after_passes_that_failed_everybody_goes_on_with_his_own_tokens(
    work: list[Work],
    extra_pages: int,
    tokens_per_pass: int,
    batch_size: int,
    groups: tuple[CacheGroup, ...],
    failures: dict[int, int | None],
) -> None:
    """Passes that fail in the layers, or when some sequences have got their next tokens; those that
    come are smaller. All of a model without windows begin alike, and share what they can."""
    tokens_per_pass = max(tokens_per_pass, batch_size)
    pages = extra_pages + max(groups[0].pages_of(w.prompt + w.limit) for w in work)
    shares = groups == (WHOLE,)
    batcher = make(work, pages, tokens_per_pass, batch_size, shares=shares, groups=groups)
    left, most = [w.answer for w in work], (tokens_per_pass, batch_size)
    for number in range(3000):
        slices = batcher.next_pass()
        assert sum(piece.num_tokens for piece in slices) <= most[0]
        assert len(slices) <= most[1]
        if not slices:
            break
        fails, num_sampled = number in failures, failures.get(number, len(slices))
        for piece in slices:
            compute(batcher._cache, piece, works=num_sampled is not None)
        if num_sampled is not None:
            for piece in slices:
                piece.sequence.num_cached += piece.num_tokens
            for sequence in [each.sequence for each in slices][:num_sampled]:
                if sequence.num_pending == 0:
                    sequence.output_tokens.append(1000)
                    left[sequence.request.index] -= 1
                    if not left[sequence.request.index]:
                        batcher.retire(sequence)
        num_running = len(batcher.running)
        if fails and batcher.shrink():
            most = most[0] // 2, min(most[0] // 2, max(1, most[1] // 2))
            assert len(batcher.running) == min(num_running, most[1])
            num_preempted = batcher.num_preempted
            batcher.repeat(slices)
            is_kept = batcher._cache.keeps_all
            assert not is_kept or batcher.num_preempted == num_preempted, "nothing was lost"
        elif fails:
            assert most[0] == 1, "passes can be smaller"
            return
        batcher._cache.check_integrity()
    assert not any(left)


def test_the_last_token_of_a_prompt_is_no_answer_even_if_it_comes_alone() -> None:
    """Passes are counted and priced by how many tokens of prompts they had."""
    sequence, found = Work(3, 4, 4).sequence(0), []
    for num_tokens in (2, 1, 1):
        if sequence.num_pending == 0:
            sequence.output_tokens.append(1000)
        piece = Slice(sequence, num_tokens)
        sequence.num_cached += num_tokens
        found.append(piece.was_decoding)
    sequence.num_cached = 0
    sequence.output_tokens += [1001, 1002]
    for num_tokens in (4, 2):  # sent back, and computed again in slices
        piece = Slice(sequence, num_tokens)
        sequence.num_cached += num_tokens
        found.append(piece.was_decoding)
    assert found == [False, False, True, False, False]


def test_prompts_ride_along_with_sequences_that_decode() -> None:
    work = [Work(4, 8, 8), Work(30, 4, 4)]
    batcher = make(work, 100, tokens_per_pass=10, batch_size=2)
    assert run_pass(batcher, work) == [(0, 4), (1, 6)]
    assert run_pass(batcher, work) == [(0, 1), (1, 9)]


def test_a_place_is_refilled_in_the_next_pass() -> None:
    work = [Work(4, 5, 1), Work(4, 5, 5), Work(4, 5, 5)]
    batcher = make(work, 100, tokens_per_pass=100, batch_size=2)
    assert run_pass(batcher, work) == [(0, 4), (1, 4)]
    assert run_pass(batcher, work) == [(1, 1), (2, 4)]


def test_the_longest_answers_begin_first() -> None:
    work = [Work(4, 1, 1), Work(4, 2, 2), Work(4, 9, 9), Work(4, 2, 2)]
    batcher = make(work, 100, tokens_per_pass=100, batch_size=2)
    assert run_pass(batcher, work) == [(2, 4), (1, 4)]
    assert run_pass(batcher, work) == [(2, 1), (1, 1)]
    assert run_pass(batcher, work) == [(2, 1), (3, 4)]


def test_static_batches_are_those_of_the_file_and_end_together() -> None:
    work = [Work(4, 1, 1), Work(4, 3, 3), Work(4, 9, 9)]
    batcher = make(work, 100, tokens_per_pass=100, batch_size=2, batching="static")
    assert run_pass(batcher, work) == [(0, 4), (1, 4)]
    assert run_pass(batcher, work) == [(1, 1)]
    assert run_pass(batcher, work) == [(1, 1)]
    assert run_pass(batcher, work) == [(2, 4)]


def test_static_batches_are_full_although_rows_begin_alike() -> None:
    """Who waited for a beginning would wait until all of the batch have ended."""
    work = [Work(70, 3, 3)] * 6
    batcher = make(work, 100, tokens_per_pass=300, batch_size=3, batching="static", shares=True)
    passes = list(iter(lambda: [index for index, _ in run_pass(batcher, work)], []))
    assert [{*rows} for rows in (passes[0], passes[-1])] == [{0, 1, 2}, {3, 4, 5}]


def test_short_answers_let_more_sequences_in_and_a_full_cache_sends_the_youngest_back() -> None:
    # Many may become long, all are short at first: the batcher learns that and admits more.
    work = [Work(4, 300, 4)] * 40 + [Work(4, 300, 200)] * 8
    batcher = make(work, 40, tokens_per_pass=64, batch_size=16)
    most_running = 0
    while run_pass(batcher, work):
        most_running = max(most_running, len(batcher.running))
    assert most_running > 40 * 16 // 304
    assert batcher.num_preempted > 0


def test_those_that_came_last_are_sent_back() -> None:
    """So that the oldest one goes on, however often that happens."""
    work = [Work(4, 300, 4)] * 40 + [Work(4, 300, 200)] * 8
    batcher = make(work, 40, tokens_per_pass=64, batch_size=16)
    num_sent_back = 0
    while True:
        before = [*batcher.running]
        if not batcher.next_pass():
            break
        gone = [one for one in before if one not in batcher.running]
        assert before[len(before) - len(gone) :] == gone
        num_sent_back += len(gone)
        run_pass(batcher, work)
    assert num_sent_back == batcher.num_preempted > 0


def test_rows_that_failed_are_no_short_answers() -> None:
    """Else more would be taken in behind them than can stay."""
    work = [Work(4, 60, 60)] * 24
    batcher = make(work, 12, tokens_per_pass=64, batch_size=16)
    failing = 16
    while slices := batcher.next_pass():
        for piece in slices:
            piece.sequence.num_cached += piece.num_tokens
            piece.sequence.is_dropped = failing > 0
            failing -= 1
            piece.sequence.output_tokens.append(1000)
            if piece.sequence.is_dropped or len(piece.sequence.output_tokens) == 60:
                batcher.retire(piece.sequence)
    assert batcher.num_preempted == 0


def test_where_the_job_stands_can_be_told_while_some_share_pages_and_others_wait() -> None:
    work = [Work(40, 300, 4)] * 40 + [Work(40, 300, 200)] * 8
    batcher = make(work, 40, tokens_per_pass=64, batch_size=16, shares=True)
    seen = False
    while run_pass(batcher, work):
        standing = batcher.standing(1)
        assert [one.cached for one in standing.in_work] == [s.num_cached for s in batcher.running]
        assert all(one.shared <= one.cached for one in standing.in_work)
        assert all(one.cached == 0 for one in standing.waiting_first)
        seen |= bool(standing.waiting_first) and any(one.shared for one in standing.in_work)
    assert seen, "both at once"


def test_those_that_wait_for_a_beginning_are_told_to_share_it() -> None:
    """Else what is left of a job is taken for all of their prompts."""
    work = [Work(70, 4, 4)] * 8
    batcher = make(work, 100, tokens_per_pass=100, batch_size=8, shares=True)
    assert run_pass(batcher, work) == [(0, 70)]
    waiting = batcher.standing(1).waiting_first
    assert [(one.pending, one.shared) for one in waiting] == [(70, 64)] * 7


def test_pages_that_several_hold_take_room_once() -> None:
    work = [Work(70, 8, 8)] * 8
    batcher = make(work, 4 + 8, tokens_per_pass=100, batch_size=8, shares=True)
    assert run_pass(batcher, work) == [(0, 70)]
    assert [len(run_pass(batcher, work)) for _ in range(7)] == [8] * 7
    assert batcher.num_preempted == 0


@pytest.mark.parametrize(("tokens_per_pass", "begin"), [(150, 1), (200, 2)])
def test_who_does_not_wait_for_a_short_beginning_waits_for_room_and_is_not_lost(
    tokens_per_pass: int, begin: int
) -> None:
    """To wait saves five times a page of 16 tokens, which is worth half of a pass or not."""
    work = [Work(20, 4, 4)] * 6
    batcher = make(work, 5, tokens_per_pass, batch_size=6, shares=True)
    passes = list(iter(lambda: run_pass(batcher, work), []))
    assert len(passes[0]) == begin
    assert {index for rows in passes for index, _ in rows} == {*range(6)}


def test_a_sequence_that_was_sent_back_keeps_what_it_has_generated() -> None:
    sequence = Work(3, 10, 5).sequence(0)
    sequence.output_tokens += [7, 8]
    sequence.num_cached = 0
    assert sequence.pending_tokens(5) == [0, 1, 2, 7, 8]
    sequence.num_cached = 2
    assert sequence.pending_tokens(2) == [2, 7]
    sequence.num_cached = 4
    assert sequence.pending_tokens(1) == [8]


@given(
    work=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=15),
    tokens_per_pass=st.integers(1, 80),
    batch_size=st.integers(1, 12),
    spare=st.integers(0, 60),
    batching=st.sampled_from(("mixed", "static")),
)
def test_the_planner_replays_the_very_passes_that_the_batcher_makes(
    work: list[tuple[int, int]],
    tokens_per_pass: int,
    batch_size: int,
    spare: int,
    batching: Batching,
) -> None:
    """Answers are as long as they may be, and too few are seen to expect anything else."""
    tokens_per_pass = max(tokens_per_pass, batch_size)
    pages = max(pages_of(p + n) for p, n in work) + spare
    sequences = [Work(prompt, new, new) for prompt, new in work]
    batcher = make(sequences, pages, tokens_per_pass, batch_size, batching)
    policy = batcher._policy
    workload = Workload(
        num_sequences=len(work),
        mean_prompt_tokens=1,
        mean_new_tokens=1,
        max_total_tokens=100,
        lengths=tuple(Length(*length) for length in work),
    )
    cached = [0] * len(work)
    for count, load in job_passes(workload, Caps.of(policy), len(work)):
        positions, rest = 0, batcher.rest()
        spare_pages = 0 if rest is None else max(0, pages - rest.num_pages)
        assert load.spare_pages == spare_pages
        for _ in range(int(count)):
            begun = {index for index in range(len(work)) if cached[index] >= work[index][0]}
            done = run_pass(batcher, sequences)
            assert load.tokens == sum(tokens for _, tokens in done)
            decoding = [index for index, _ in done if index in begun]
            positions += sum(cached[index] + 1 for index in decoding)
            for index, tokens in done:
                cached[index] += tokens
            if not batcher.num_preempted:  # what was sent back is prompt again
                assert load.decode_sequences == len(decoding)
        if not batcher.num_preempted:
            assert count * load.decode_positions == positions
    assert not run_pass(batcher, sequences), "both have come to the end"
