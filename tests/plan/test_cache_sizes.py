"""Slots of a cache divided among layers: AdapMoE's figures, and every division of small cases."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.layout.cache_sizes import Costs, best_sizes, even_sizes
from tests.plan.adapmoe import LayerHabits, cost_table, expected_loads, greedy_sizes, total_cost

_PUBLISHED = Path(__file__).parent / "published" / "adapmoe_mixtral_8x7b.json"
_CHANCES = st.floats(0, 1)
LAYERS = st.lists(st.builds(LayerHabits, _CHANCES, _CHANCES), min_size=1, max_size=5)


def published(*, gating: bool) -> Costs:
    found = json.loads(_PUBLISHED.read_text())
    alphas, betas = (
        found["single_expert_probability_alpha"],
        found["prefetch_accuracy_beta"],
    )
    layers = [
        LayerHabits(alpha if gating else 0.0, beta)
        for alpha, beta in zip(alphas, betas, strict=True)
    ]
    return cost_table(layers, num_experts=8)


def test_published_mixtral_with_adaptive_gating() -> None:
    costs = published(gating=True)
    sizes = best_sizes(costs, 128)
    expected = "8 8 6 6 5 5 5 5 5 6 5 5 5 5 5 5 5 5 5 4 4 3 3 4 2 2 2 0 0 0 0 0"
    assert " ".join(map(str, sizes)) == expected
    assert total_cost(costs, sizes) == pytest.approx(6.6624, abs=5e-5)
    assert total_cost(costs, even_sizes(32, 8, 128)) == pytest.approx(8.9587, abs=5e-5)


def test_published_mixtral_with_a_slot_for_every_layer() -> None:
    costs = published(gating=True)
    assert total_cost(costs, best_sizes(costs, 128, least=1)) == pytest.approx(6.909, abs=5e-4)


def test_published_mixtral_without_gating() -> None:
    costs = published(gating=False)
    assert total_cost(costs, best_sizes(costs, 128)) == pytest.approx(10.5032, abs=5e-5)
    assert total_cost(costs, even_sizes(32, 8, 128)) == pytest.approx(10.9167, abs=5e-5)


@given(LAYERS, st.integers(2, 4), st.integers(0, 16))
def test_no_division_costs_less(
    layers: list[LayerHabits], num_experts: int, num_slots: int
) -> None:
    costs = cost_table(layers, num_experts=num_experts)
    total = min(num_slots, len(layers) * num_experts)
    best = best_sizes(costs, num_slots)
    assert sum(best) == total
    every = (
        sizes
        for sizes in product(range(num_experts + 1), repeat=len(layers))
        if sum(sizes) == total
    )
    least = min(total_cost(costs, sizes) for sizes in every)
    assert total_cost(costs, best) == pytest.approx(least, abs=1e-12)


@given(LAYERS, st.integers(2, 16), st.integers(0, 80), st.integers(0, 1))
def test_slot_by_slot_costs_as_little(
    layers: list[LayerHabits], num_experts: int, num_slots: int, least: int
) -> None:
    num_slots = max(num_slots, least * len(layers))
    costs = cost_table(layers, num_experts=num_experts)
    one, other = (f(costs, num_slots, least=least) for f in (best_sizes, greedy_sizes))
    assert sum(one) == sum(other)
    assert total_cost(costs, one) == pytest.approx(total_cost(costs, other), abs=1e-9)


@given(st.builds(LayerHabits, _CHANCES, _CHANCES), st.integers(2, 64))
def test_every_slot_more_gains_less(habits: LayerHabits, num_experts: int) -> None:
    costs = cost_table([habits], num_experts=num_experts)[0]
    gains = -np.diff(costs)
    assert (gains >= -1e-12).all()
    assert (np.diff(gains) <= 1e-12).all()


def test_what_is_there_is_not_waited_for() -> None:
    assert expected_loads(LayerHabits(), num_experts=8, num_cached=8) == 0
    assert expected_loads(LayerHabits(), num_experts=8, num_cached=0) == pytest.approx(2.0)
    assert expected_loads(LayerHabits(1.0), num_experts=8, num_cached=0) == pytest.approx(1.0)
    known = LayerHabits(foreseen=1.0)
    assert expected_loads(known, num_experts=8, num_cached=0) == pytest.approx(1.0)
