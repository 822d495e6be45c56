"""Copying pages and rows: every unit arrives, whatever way it goes."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.store.kv_moves import Moves

NUM_UNITS = 40
places = st.lists(st.integers(0, NUM_UNITS - 1), unique=True, max_size=NUM_UNITS)


def stretched(starts: list[int], length: int) -> list[int]:
    """Distinct units, some of which follow each other."""
    units = [start + i for start in starts for i in range(length) if start + i < NUM_UNITS]
    return list(dict.fromkeys(units))


@given(places, places, st.integers(1, 8), st.integers(1, 8))
def test_each_unit_arrives_and_nothing_else_changes(
    sources: list[int], targets: list[int], source_length: int, target_length: int
) -> None:
    pairs = list(
        zip(stretched(sources, source_length), stretched(targets, target_length), strict=False)
    )
    source, target = torch.arange(2.0 * NUM_UNITS).view(-1, 2), torch.full((NUM_UNITS, 2), -1.0)
    moves = Moves.of([a for a, _ in pairs], [b for _, b in pairs])
    moves.copy(source, target)
    expected = torch.full((NUM_UNITS, 2), -1.0)
    for a, b in pairs:
        expected[b] = source[a]
    assert target.equal(expected)
    assert len(moves) == len(pairs)


@given(places, places, st.integers(1, 8), st.integers(1, 8))
def test_runs_are_all_of_the_moves_and_as_long_as_can_be(
    sources: list[int], targets: list[int], source_length: int, target_length: int
) -> None:
    pairs = list(
        zip(stretched(sources, source_length), stretched(targets, target_length), strict=False)
    )
    runs = Moves.of([a for a, _ in pairs], [b for _, b in pairs]).runs
    assert [(run.source + i, run.target + i) for run in runs for i in range(run.length)] == pairs
    for run, following in pairwise(runs):
        ends = run.source + run.length, run.target + run.length
        assert ends != (following.source, following.target)
