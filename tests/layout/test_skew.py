"""Routing that is drawn: as popular as the skew says, the same for the same seed."""

from dataclasses import replace

import numpy as np
import pytest

from moebatch.layout.routing import SkewedRouting, distinct_experts
from tests.plan.problems import SHAPE


@pytest.mark.parametrize("tokens", [1, 7, 1024, 100_000])
@pytest.mark.parametrize("exponent", [0.0, 1.2])
def test_every_token_chooses_k_experts(tokens: int, exponent: float) -> None:
    routing = SkewedRouting(shape=SHAPE, exponent=exponent)
    rows = routing.rows(0, 3, 1, tokens)
    assert rows.shape == (8,)
    assert rows.max() <= tokens
    assert rows.sum() == pytest.approx(2 * tokens, rel=0 if tokens <= 1024 else 0.02)


@pytest.mark.parametrize("tokens", [7, 1024, 100_000])
@pytest.mark.parametrize("exponent", [0.0, 1.2])
def test_choices_that_compute_nothing_are_as_popular_as_experts(
    tokens: int, exponent: float
) -> None:
    """Eight of them beside eight experts: of two choices of a token one."""
    shape = replace(SHAPE, router=replace(SHAPE.router, num_identities=8))
    routing = SkewedRouting(shape=shape, exponent=exponent)
    rows = np.mean([routing.rows(number, 3, 1, tokens) for number in range(20)], axis=0)
    assert rows.shape == (8,)
    assert rows.sum() == pytest.approx(tokens, rel=0.15 if tokens < 1000 else 0.02)
    assert routing.chances(3).sum() == pytest.approx(1, rel=0.02)
    assert distinct_experts(shape, 2) == pytest.approx(8 * (1 - (7 / 8) ** 2))


def test_without_a_skew_all_experts_are_alike() -> None:
    rows = SkewedRouting(shape=SHAPE).rows(0, 0, 0, 200_000)
    assert rows == pytest.approx([50_000] * 8, rel=0.03)


def test_with_a_skew_the_most_popular_expert_gets_several_times_the_least() -> None:
    routing = SkewedRouting(shape=SHAPE, exponent=1.2)
    rows = routing.rows(0, 5, 0, 100_000)
    order = np.argsort(-routing.chances(5))
    assert list(order) == list(np.argsort(-rows))
    assert rows[order[0]] > 4 * rows[order[-1]]


def test_layers_like_different_experts() -> None:
    routing = SkewedRouting(shape=SHAPE, exponent=1.2)
    assert len({tuple(routing.chances(layer)) for layer in range(32)}) > 20


def test_the_same_seed_draws_the_same() -> None:
    def rows(seed: int) -> list[float]:
        return list(SkewedRouting(shape=SHAPE, exponent=1, seed=seed).rows(2, 3, 4, 50))

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_chances_are_those_of_what_is_chosen() -> None:
    routing = SkewedRouting(shape=SHAPE, exponent=1.2)
    assert routing.chances(0).sum() == pytest.approx(SHAPE.experts_per_token)
    assert routing.rows(0, 0, 0, 100_000) / 100_000 == pytest.approx(routing.chances(0), abs=0.02)
