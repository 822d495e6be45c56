"""Rankings from what a pass has chosen so far."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.predict.correlation import MAX_LEARNT_ROWS, CorrelationPredictor
from moebatch.predict.path_table import PathTable
from tests.predict.test_path_table import pencil_table, random_pass


def single_paths(paths: list[list[int]], *, path_length: int) -> PathTable:
    """A table of tokens that chose one of three experts at each of three layers."""
    table = PathTable.empty((0, 1, 2), num_experts=3, experts_per_token=1, path_length=path_length)
    table.add_pass(np.array(paths).T[:, :, None])
    return table


def told(table: PathTable, *chosen: list[int]) -> CorrelationPredictor:
    """A predictor that has seen one token choose those experts, layer by layer."""
    predictor = CorrelationPredictor(table, learns=False)
    predictor.begin_pass(1)
    for layer, experts in enumerate(chosen):
        predictor.observe(table.moe_layers[layer], slice(0, 1), np.array([experts]))
    return predictor


def test_experts_are_ranked_by_the_probability_that_they_follow() -> None:
    predictor = told(pencil_table(), [0, 2])
    assert predictor.expected(1).tolist() == pytest.approx([2 / 6 + 1 / 4, 1 / 6 + 2 / 4, 3 / 4])
    assert predictor.rank(1) == [2, 1, 0]


def test_the_first_layer_goes_by_marginal_counts() -> None:
    predictor = told(pencil_table())
    assert predictor.rank(0) == [0, 1, 2]
    assert predictor.expected(0).tolist() == pytest.approx([2 * 3 / 8, 2 * 3 / 8, 2 * 2 / 8])


def test_nothing_known_is_even_and_by_number() -> None:
    table = PathTable.empty((0, 1), num_experts=4, experts_per_token=2)
    predictor = told(table, [3, 1])
    assert predictor.rank(1) == [0, 1, 2, 3]
    assert predictor.expected(1).tolist() == [0.5] * 4


def test_a_longer_path_knows_better_and_backs_off_where_it_was_never_taken() -> None:
    table = single_paths([[0, 1, 2], [0, 1, 2], [2, 1, 0]], path_length=2)
    assert told(table, [2], [1]).expected(2).tolist() == [1, 0, 0]
    assert told(table, [1], [1]).expected(2).tolist() == pytest.approx([1 / 3, 0, 2 / 3])
    assert told(table, [0], [0]).rank(2) == [2, 0, 1], "nobody came through 0: marginal counts"


def test_a_layer_that_has_not_chosen_is_stood_in_for_by_what_is_expected_of_it() -> None:
    table = single_paths([[0, 1, 2], [0, 2, 0], [1, 1, 2]], path_length=1)
    # From 0 half of the tokens go to 1 and half to 2; from 1 to 2, from 2 to 0.
    assert told(table, [0]).expected(2).tolist() == pytest.approx([0.5, 0, 0.5])
    assert told(table, [1]).expected(2).tolist() == pytest.approx([0, 0, 1])


def test_a_path_of_length_0_looks_at_no_other_layer() -> None:
    table = pencil_table().without_paths()
    assert told(table, [0, 2]).rank(1) == told(table).rank(1) == [0, 2, 1]


def test_rows_that_have_chosen_count_as_what_they_chose() -> None:
    predictor = CorrelationPredictor(pencil_table(), learns=False)
    predictor.begin_pass(3)
    predictor.observe(0, slice(0, 2), np.array([[0, 2], [0, 2]]))
    predictor.observe(1, slice(0, 1), np.array([[1, 0]]))
    after_02 = np.array([2 / 6 + 1 / 4, 1 / 6 + 2 / 4, 3 / 4])
    nothing_known = np.array([3 / 4, 3 / 4, 2 / 4]) @ (
        np.array([[2, 1, 3], [3, 1, 2], [1, 2, 1]]) / [[6], [6], [4]]
    )
    assert predictor.expected(1) == pytest.approx(np.array([1, 1, 0]) + after_02 + nothing_known)


def test_it_guesses_while_the_layer_before_is_ahead() -> None:
    predictor = CorrelationPredictor(pencil_table(), learns=False)
    predictor.begin_pass(2)
    assert not predictor.is_guess(1)
    predictor.observe(0, slice(0, 2), np.array([[0, 2], [0, 2]]))
    predictor.observe(1, slice(0, 1), np.array([[1, 0]]))
    assert predictor.is_guess(1) and not predictor.is_guess(0)
    predictor.observe(1, slice(1, 2), np.array([[1, 0]]))
    assert not predictor.is_guess(1)


def test_a_new_pass_forgets_the_one_before() -> None:
    predictor = told(pencil_table(), [2, 1], [0, 1])
    before = predictor.expected(1).tolist()
    predictor.begin_pass(1)
    assert before == [1, 1, 0]
    assert predictor.expected(1).tolist() == told(pencil_table()).expected(1).tolist()


def test_layers_without_experts_may_lie_between() -> None:
    table = PathTable.empty((1, 4), num_experts=3, experts_per_token=2)
    predictor = CorrelationPredictor(table)
    for experts_TK in ([[0, 1], [2, 1]],) * 2:
        predictor.begin_pass(2)
        predictor.observe(1, slice(0, 2), np.array(experts_TK))
        predictor.observe(4, slice(0, 2), np.array(experts_TK))
    predictor.begin_pass(1)
    predictor.observe(1, slice(0, 1), np.array([[2, 1]]))
    assert predictor.rank(4) == [1, 2, 0]


@pytest.mark.parametrize("path_length", [0, 1, 2])
def test_counting_while_a_job_runs_is_counting_at_once(path_length: int) -> None:
    at_once, running = (
        PathTable.empty(range(4), num_experts=5, experts_per_token=2, path_length=path_length)
        for _ in range(2)
    )
    predictor = CorrelationPredictor(running)
    for seed in range(3):
        experts_LTK = random_pass(seed, layers=4, tokens=40 + seed, experts=5, k=2)
        at_once.add_pass(experts_LTK)
        predictor.begin_pass(40 + seed)
        for layer in range(4):
            for rows in (slice(0, 7), slice(7, 40 + seed)):
                predictor.observe(layer, rows, experts_LTK[layer, rows])
    for one, other in zip(at_once.counts, running.counts, strict=True):
        assert np.array_equal(one, other)


def test_of_many_rows_only_some_are_counted_while_a_job_runs() -> None:
    table = PathTable.empty((0,), num_experts=4, experts_per_token=1)
    predictor = CorrelationPredictor(table)
    num_rows = 3 * MAX_LEARNT_ROWS + 1
    predictor.begin_pass(num_rows)
    predictor.observe(0, slice(0, num_rows), np.full((num_rows, 1), 2))
    assert MAX_LEARNT_ROWS // 2 < table.counts[0].sum() <= MAX_LEARNT_ROWS
    assert predictor.expected(0)[2] == num_rows, "all of them are observed"


@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 7),
    path_length=st.integers(0, 3),
    data=st.data(),
)
def test_a_ranking_has_every_expert_once_and_expectations_add_up(
    seed: int, experts: int, path_length: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, experts))
    layers, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    table = PathTable.empty(
        range(layers), num_experts=experts, experts_per_token=k, path_length=path_length
    )
    if data.draw(st.booleans()):
        table.add_pass(random_pass(seed, layers=layers, tokens=20, experts=experts, k=k))
    predictor = CorrelationPredictor(table, learns=data.draw(st.booleans()))
    predictor.begin_pass(tokens)
    experts_LTK = random_pass(seed + 1, layers=layers, tokens=tokens, experts=experts, k=k)
    num_chosen = tokens
    for layer in range(layers):  # a later layer has never chosen for more rows
        num_chosen = data.draw(st.integers(0, num_chosen))
        if num_chosen:
            rows = slice(0, num_chosen)
            predictor.observe(layer, rows, experts_LTK[layer, rows])
        for asked in range(layers):
            assert sorted(predictor.rank(asked)) == list(range(experts))
            expected = predictor.expected(asked)
            assert expected.min() >= 0
            assert expected.sum() == pytest.approx(tokens * k)
