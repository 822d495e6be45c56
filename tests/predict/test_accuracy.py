"""How accuracy is counted."""

import numpy as np
import pytest

from moebatch.predict.accuracy import accuracy, mean_accuracy
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.path_table import PathTable
from moebatch.predict.trace import RoutingTrace

TOKENS_LTK = np.array(
    [
        [[0, 1], [0, 1], [0, 2], [3, 0]],
        [[2, 3], [2, 3], [2, 3], [0, 2]],
    ]
)
TRACE = RoutingTrace.of([TOKENS_LTK], (0, 1), num_experts=4)


def predictor() -> CorrelationPredictor:
    """Always says 0 and 1 first, then 2, then 3."""
    table = PathTable.empty((0, 1), num_experts=4, experts_per_token=2, path_length=0)
    return CorrelationPredictor(table, learns=False)


def test_a_whole_pass() -> None:
    first, second = accuracy(predictor(), TRACE, group_tokens=4)
    assert (first.layer, first.took_part, first.hot) == (0, 1.0, 1.0)
    # 0 was chosen once, 1 never; 2 and 3 were hot.
    assert (second.layer, second.took_part, second.hot) == (1, 0.5, 0.0)
    assert mean_accuracy((first, second)) == (0.75, 0.5)


def test_single_tokens() -> None:
    first, second = accuracy(predictor(), TRACE, group_tokens=1)
    assert first.took_part == first.hot == pytest.approx((1 + 1 + 0.5 + 0.5) / 4)
    assert second.took_part == second.hot == pytest.approx((0 + 0 + 0 + 0.5) / 4)


def test_groups_are_whole_and_a_shorter_pass_is_one() -> None:
    """Of five tokens the last one is left over where two make a group."""
    right, wrong = [0, 1], [2, 3]
    trace = RoutingTrace.of([np.array([[right, right, wrong, wrong, right]])], (0,), num_experts=4)
    (in_pairs,) = accuracy(predictor(), trace, group_tokens=2)
    assert in_pairs.took_part == 0.5
    (together,) = accuracy(predictor(), trace, group_tokens=6)
    assert together.took_part == 1.0


def test_of_many_groups_those_are_looked_at_that_lie_all_over() -> None:
    half = [[0, 1]] * 2000 + [[2, 3]] * 2000
    trace = RoutingTrace.of([np.array([half])], (0,), num_experts=4)
    (only,) = accuracy(predictor(), trace, group_tokens=1)
    assert only.took_part == pytest.approx(0.5, abs=0.01)


def test_a_tie_with_the_last_hot_one_is_a_hit() -> None:
    trace = RoutingTrace.of([np.array([[[0, 2], [0, 1]]])], (0,), num_experts=4)
    table = PathTable.empty((0,), num_experts=4, experts_per_token=2, path_length=0)
    table.add_pass(np.array([[[0, 2]]]))
    (only,) = accuracy(CorrelationPredictor(table, learns=False), trace, group_tokens=2)
    assert only.hot == 1.0
