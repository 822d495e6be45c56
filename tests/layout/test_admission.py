"""Passes are within their caps, and every token of every sequence is computed."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from moebatch.layout.admission import (
    AHEAD_TOKENS,
    Admission,
    Caps,
    fields_of,
    longest_first,
)
from moebatch.spec.model.cache_layout import UNLIMITED
from moebatch.spec.policy.policy import pages_of
from moebatch.spec.workload import Length

lengths = st.lists(
    st.builds(Length, st.integers(1, 400), st.integers(1, 9), st.just(0)), max_size=60
)


def of(length: Length) -> Length:
    return length


@given(lengths)
def test_within_sight_long_answers_go_first_and_equal_ones_keep_their_order(
    work: list[Length],
) -> None:
    assert list(longest_first(work, of)) == sorted(work, key=lambda length: -length.new_tokens)


@given(lengths)
def test_a_long_file_is_read_only_so_far_ahead(work: list[Length]) -> None:
    scale, held = AHEAD_TOKENS // 200, 0

    def read() -> Iterator[Length]:
        nonlocal held
        for prompt, new, _ in work:
            assert held <= AHEAD_TOKENS, "no more is read before that much is handed out"
            held += prompt * scale
            yield Length(prompt * scale, new)

    taken = []
    for prompt, new, _ in longest_first(read(), of):
        held -= prompt
        taken.append(Length(prompt // scale, new))
    assert sorted(taken) == sorted(work)


@given(
    work=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=15),
    sequences=st.integers(1, 12),
    tokens=st.integers(12, 80),
    spare=st.integers(0, 20),
    is_static=st.booleans(),
)
def test_no_pass_exceeds_a_cap_and_all_tokens_are_computed(
    work: list[tuple[int, int]], sequences: int, tokens: int, spare: int, is_static: bool
) -> None:
    pages = max(pages_of(prompt + new) for prompt, new in work) + spare
    admission = Admission(
        Caps(sequences=sequences, tokens=tokens, pages=pages, is_static=is_static)
    )
    waiting_FN = fields_of([(prompt, 0, 0, new) for prompt, new in work])
    num_computed = num_again = 0
    while waiting_FN.shape[1] or len(admission):
        while admission.lacks_pages:
            returned_F1 = admission.send_back()
            num_again += int(returned_F1[0, 0])
            waiting_FN = np.concatenate([returned_F1, waiting_FN], axis=1)
        if admission.takes_more:
            waiting_FN = waiting_FN[:, admission.take_in(waiting_FN) :]
        slices_S = admission.slices()
        assert 0 < slices_S.sum() <= tokens
        assert len(admission) <= sequences
        assert admission.pages_held() <= pages or len(admission) == 1
        num_computed += int(slices_S.sum())
        admission.advance(slices_S)
    # The newest token of what was sent back had not been computed, but is counted as sent back.
    num_once = sum(prompt + new - 1 for prompt, new in work)
    assert num_once <= num_computed <= num_once + num_again


growing = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 50)), max_size=70)


@given(
    in_work=growing,
    waiting=growing,
    pages=st.sampled_from([5, 40, 150, 400]),
    most_cached=st.sampled_from([UNLIMITED, 40, 70]),
)
def test_as_many_are_taken_in_as_the_cache_holds_until_they_end(
    in_work: list[tuple[int, int]],
    waiting: list[tuple[int, int]],
    pages: int,
    most_cached: int,
) -> None:
    caps = Caps(sequences=200, tokens=10**6, pages=pages, is_static=False, most_cached=most_cached)
    admission = Admission(caps, fields_of([(0, cached, 0, left) for cached, left in in_work]))
    count = admission.take_in(fields_of([(prompt, 0, 0, new) for prompt, new in waiting]))
    # A decoding sequence has its newest token beside those that are cached.
    everything = [*((cached + 1, left) for cached, left in in_work), *waiting]

    def fits(num_taken: int) -> bool:
        taken = everything[: len(in_work) + num_taken]
        held = caps.occupancy.peak(*zip(*taken, strict=True)) if taken else 0
        return held <= pages

    is_alone = not in_work and count == 1
    assert count == 0 or fits(count) or is_alone
    assert count == len(waiting) or not fits(count + 1)


@given(
    prompt=st.integers(1, 60),
    new=st.integers(1, 50),
    tokens=st.integers(12, 90),
    held=st.floats(1.0, 9.0),
    most_cached=st.sampled_from([UNLIMITED, 40, 70]),
)
def test_sequences_alike_are_taken_in_as_if_they_had_not_been_known_before(
    prompt: int, new: int, tokens: int, held: float, most_cached: int
) -> None:
    pages = int(held * pages_of(min(most_cached, prompt + new)))
    caps = Caps(sequences=12, tokens=tokens, pages=pages, is_static=False, most_cached=most_cached)
    admission, waiting_FN = Admission(caps), fields_of([(prompt, 0, 0, new)] * 40)
    while waiting_FN.shape[1] or len(admission):
        assert not admission.lacks_pages
        in_work = [
            (pending, cached, 0, new if pending else new - 1 - (cached - prompt))
            for pending, cached in zip(admission.pending_S, admission.cached_S, strict=True)
        ]
        count = admission.take_in(waiting_FN)
        assert count == Admission(caps, fields_of(in_work)).take_in(waiting_FN)
        waiting_FN = waiting_FN[:, count:]
        admission.advance(admission.slices())


@given(
    in_work=st.lists(st.tuples(st.integers(1, 60), st.integers(2, 50)), min_size=1, max_size=8),
    next_one=st.tuples(st.integers(1, 60), st.integers(1, 50)),
    share=st.floats(0.5, 1.0),
    most_cached=st.sampled_from([UNLIMITED, 40, 70]),
)
def test_passes_are_alike_until_one_ends_or_is_sent_back_or_comes(
    in_work: list[tuple[int, int]], next_one: tuple[int, int], share: float, most_cached: int
) -> None:
    """Of pages there are at least those that are held, and fewer than all will need."""

    def after(num_passes: int) -> Admission:
        rows = [(0, cached + num_passes, 0, left - num_passes) for cached, left in in_work]
        return Admission(caps, fields_of(rows))

    caps = Caps(sequences=99, tokens=999, pages=0, is_static=False, most_cached=most_cached)
    in_the_end = sum(pages_of(min(most_cached, sum(each))) for each in (*in_work, next_one))
    pages = max(after(0).pages_held(), int(share * in_the_end))
    caps = replace(caps, pages=pages)
    waiting_F1 = fields_of([(next_one[0], 0, 0, next_one[1])])
    assume(not after(0).take_in(waiting_F1))
    count = after(0).passes_alike(waiting_F1)
    for num_passes in range(1, count + 1):
        later = after(num_passes)
        one_ends = num_passes == min(left for _, left in in_work)
        changes = one_ends or later.lacks_pages or later.take_in(waiting_F1) > 0
        assert changes == (num_passes == count)


def test_the_youngest_sequence_is_sent_back_with_all_that_is_known_of_it() -> None:
    caps = Caps(sequences=3, tokens=64, pages=3, is_static=False)
    admission = Admission(caps, fields_of([(0, 32, 0, 5), (0, 15, 0, 9)]))
    assert admission.lacks_pages
    assert admission.send_back().T.tolist() == [[16, 0, 0, 9]]
    assert not admission.lacks_pages


@given(
    work=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=12),
    sequences=st.integers(1, 6),
    tokens=st.integers(6, 80),
    is_static=st.booleans(),
)
def test_prompts_that_are_encoded_are_computed_whole(
    work: list[tuple[int, int]], sequences: int, tokens: int, is_static: bool
) -> None:
    pages = sum(pages_of(prompt + new) for prompt, new in work)
    caps = Caps(sequences=sequences, tokens=tokens, pages=pages, is_static=is_static, encodes=True)
    admission, computed = Admission(caps), list[int]()
    waiting_FN = fields_of([(prompt, 0, 0, new) for prompt, new in work])
    while waiting_FN.shape[1] or len(admission):
        if admission.takes_more:
            waiting_FN = waiting_FN[:, admission.take_in(waiting_FN) :]
        slices_S = admission.slices()
        is_prompt_S = (admission.pending_S > 0) & (slices_S > 0)
        assert slices_S[is_prompt_S].tolist() == admission.pending_S[is_prompt_S].tolist()
        assert 0 < slices_S.sum() <= tokens or (slices_S > 0).sum() == 1
        computed.extend(slices_S[is_prompt_S].tolist())
        admission.advance(slices_S)
    assert sorted(computed) == sorted(prompt for prompt, _ in work)
