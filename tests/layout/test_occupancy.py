"""The largest number of pages that sequences hold until they end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moebatch.layout.occupancy import Occupancy
from moebatch.spec.model.cache_layout import UNLIMITED
from moebatch.spec.policy.policy import pages_of

sequences = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 60)), max_size=12)
bounds = st.one_of(st.just(UNLIMITED), st.integers(1, 100))


@given(sequences, bounds)
def test_it_is_that_of_letting_all_of_them_grow(
    work: list[tuple[int, int]], most_cached: int
) -> None:
    most = 0
    for passes in range(61):
        held = [
            pages_of(tokens + passes if tokens + left <= most_cached else most_cached)
            for tokens, left in work
            if left >= passes
        ]
        most = max(most, sum(held))
    tokens, left = [tokens for tokens, _ in work], [left for _, left in work]
    assert Occupancy(most_cached=most_cached).peak(tokens, left) == most


@given(sequences, bounds)
def test_the_peaks_to_come_are_those_of_the_longest_that_are_left(
    work: list[tuple[int, int]], most_cached: int
) -> None:
    longest = sorted(work, key=lambda pair: -pair[1])
    occupancy = Occupancy(most_cached=most_cached)
    found = occupancy.peaks(*np.array(work, np.int64).reshape(-1, 2).T)
    for passes in range(61):
        going_on = [(tokens + passes, left - passes) for tokens, left in longest if left > passes]
        if going_on:
            assert found[len(going_on) - 1] == occupancy.peak(*zip(*going_on, strict=True))


def test_sequences_of_one_length_need_all_their_pages_at_once() -> None:
    assert Occupancy().peak([450] * 100, [32] * 100) == 100 * pages_of(482)


def test_sequences_that_end_one_after_the_other_make_room_for_each_other() -> None:
    alone = [pages_of(16 + left) for left in range(0, 160, 16)]
    assert Occupancy().peak([16] * 10, list(range(0, 160, 16))) < 0.7 * sum(alone)
