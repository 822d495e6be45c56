"""What a table is told of a text, and asked of its last tenth beforehand."""

import numpy as np

from moebatch.calibration.counting import GROUP_TOKENS, count
from moebatch.predict.path_table import PathTable

KNOWN_LTK = np.array([[[0], [1]] * 10, [[1], [0]] * 10])
"""Whoever chose 0 chooses 1 next, and whoever chose 1 chooses 0."""
UNSEEN_LTK = np.array([[[1]] * 9, [[0]] * 9])


def empty() -> PathTable:
    return PathTable.empty((0, 3), num_experts=3, experts_per_token=1)


def test_what_is_held_out_is_foreseen_by_what_is_known_and_then_counted_as_well() -> None:
    table = empty()
    popular_LE, _ = count(table, [KNOWN_LTK], [UNSEEN_LTK])
    assert popular_LE.tolist() == [[10, 10, 0], [10, 10, 0]], "without what is held out"
    whole = empty()
    for portion_LTK in (KNOWN_LTK, UNSEEN_LTK):
        whole.add_pass(portion_LTK)
    for one, other in zip(table.counts, whole.counts, strict=True):
        assert np.array_equal(one, other)


def test_the_table_is_compared_with_its_marginal_counts() -> None:
    marginal_LTK = np.array([[[1]] * 3, [[1]] * 3])  # so that 1 is the most frequent in both
    _, comparisons = count(empty(), [KNOWN_LTK, marginal_LTK], [UNSEEN_LTK])
    assert tuple(one.group_tokens for one in comparisons) == GROUP_TOKENS
    for one in comparisons:
        assert [layer.layer for layer in one.correlation] == [0, 3]
        assert one.correlation[1].hot == 1.0, "after 1 comes 0"
        assert one.marginal[1].hot == 0.0, "of all, 1 is the most frequent"


def test_without_anything_held_out_nothing_is_compared() -> None:
    assert count(empty(), [KNOWN_LTK], [])[1] == ()
