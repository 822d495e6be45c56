"""Experts that matter little are left out, and nothing else is changed by that."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.model.routing.gating import AdaptiveGating, GatingCount
from moebatch.model.routing.router import choose_experts
from moebatch.model.routing.tokens import group_by_expert
from moebatch.spec.model.blocks import Router

EXPERTS = 6
SUMMING = Router(norm_order=1.0)


def gating(threshold: float, sensitivity: float = 1.0) -> AdaptiveGating:
    return AdaptiveGating(threshold, {0: sensitivity})


def dropped(one: AdaptiveGating, weights: list[float]) -> tuple[list[float], list[int]]:
    weights_RK = torch.tensor([weights])
    experts_RK = torch.arange(len(weights))[None].clone()
    one.drop(0, weights_RK, experts_RK, EXPERTS)
    return weights_RK[0].tolist(), experts_RK[0].tolist()


def test_the_rule_of_the_paper_for_two_experts() -> None:
    """One expert if and only if (1 - alpha)^2 times the sensitivity is at most T."""
    assert dropped(gating(0.04), [0.81, 0.19]) == (pytest.approx([1.0, 0.0]), [0, EXPERTS])
    assert dropped(gating(0.04), [0.79, 0.21]) == (pytest.approx([0.79, 0.21]), [0, 1])
    assert dropped(gating(0.04, sensitivity=4.0), [0.89, 0.11])[1] == [0, 1]
    assert dropped(gating(0.04, sensitivity=4.0), [0.91, 0.09])[1] == [0, EXPERTS]


def test_of_more_than_two_the_smallest_go_together() -> None:
    weights, experts = dropped(gating(0.04), [0.6, 0.25, 0.1, 0.05])
    assert experts == [0, 1, EXPERTS, EXPERTS]
    assert weights == pytest.approx([0.6 / 0.85, 0.25 / 0.85, 0, 0])


def test_weights_that_do_not_sum_to_one_keep_their_sum() -> None:
    weights, experts = dropped(gating(0.04), [0.4, 0.05])
    assert experts == [0, EXPERTS] and weights == pytest.approx([0.45, 0.0])


@given(st.integers(0, 10**6), st.floats(1e-4, 0.3))
def test_a_choice_is_left_out_from_its_least_threshold_on(seed: int, sensitivity: float) -> None:
    logits = torch.randn(20, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights_RK, experts_RK = choose_experts(logits, Router(), 3, {}, torch.float32)
    least_RK = gating(0.0, sensitivity).least_thresholds(0, weights_RK)
    for factor, expected in ((0.99, False), (1.01, True)):
        for row in range(len(logits)):
            for choice in (1, 2):
                threshold = factor * float(least_RK[row, choice - 1])
                one, experts_1K = (
                    weights_RK[row : row + 1].clone(),
                    experts_RK[row : row + 1].clone(),
                )
                gating(threshold, sensitivity).drop(0, one, experts_1K, EXPERTS)
                assert (int(experts_1K[0, choice]) == EXPERTS) is expected


def test_decisions_are_counted() -> None:
    count = GatingCount()
    assert (count.num_decisions, count.single_share, count.mean_experts) == (0, 0.0, 0.0)
    count.add(torch.tensor([[False, False, True], [False, True, True]]))
    count.add(torch.tensor([[False, False, False], [False, True, True]]))
    assert (count.num_decisions, count.single_share, count.mean_experts) == (4, 0.5, 3 - 5 / 4)


def test_layers_of_which_the_loss_hardly_depends_use_one_expert() -> None:
    assert dropped(gating(0.04, sensitivity=0.01), [0.5, 0.5])[1] == [0, EXPERTS]


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_a_threshold_of_zero_changes_nothing(seed: int, num_chosen: int) -> None:
    logits = torch.randn(20, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights_RK, experts_RK = choose_experts(logits, SUMMING, num_chosen, {}, torch.float32)
    same_weights, same_experts = weights_RK.clone(), experts_RK.clone()
    gating(0.0, sensitivity=1e-9).drop(0, same_weights, same_experts, EXPERTS)
    assert torch.equal(weights_RK, same_weights) and torch.equal(experts_RK, same_experts)


@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0, 0.5))
def test_what_is_left_is_grouped_by_expert(seed: int, num_chosen: int, threshold: float) -> None:
    logits = torch.randn(20, EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights_RK, experts_RK = choose_experts(logits, SUMMING, num_chosen, {}, torch.float32)
    gating(threshold).drop(0, weights_RK, experts_RK, EXPERTS)
    assert torch.allclose(weights_RK.sum(1), torch.ones(20))
    assert (experts_RK[:, 0] < EXPERTS).all(), "the first one always stays"
    for rows in (slice(0, 20), slice(3, 9)):
        found = {
            (int(row), int(choice)): expert
            for expert, tokens in group_by_expert(experts_RK, rows, EXPERTS).items()
            for row, choice in zip(*tokens, strict=True)
        }
        expected = {
            (row, choice): int(experts_RK[row, choice])
            for row in range(rows.start, rows.stop)
            for choice in range(num_chosen)
            if experts_RK[row, choice] < EXPERTS
        }
        assert found == expected
