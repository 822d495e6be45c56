"""What a cache of experts costs by AdapMoE's own formulas (section 4.4, Eq. 11 to 15), and a
check of how it is divided."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moebatch.layout.cache_sizes import Costs


@dataclass(frozen=True, slots=True)
class LayerHabits:
    """What decides over the loads of a layer in which a token chooses two experts at most."""

    single: float = 0.0
    """Share of tokens that make do with one (alpha)."""
    foreseen: float = 0.0
    """Chance that the one expert that comes beforehand is one that is needed and not there (beta).
    The paper calls it the accuracy of prefetching; only so do its cases add up to one."""


def expected_loads(habits: LayerHabits, *, num_experts: int, num_cached: float) -> float:
    """Experts that a token waits for, where `num_cached` of the layer's N, any of them with equal
    chance, are there (Eq. 11 to 15, with the parentheses that Eq. 12 lacks)."""
    N, t = num_experts, num_cached
    both_missing = max(0.0, (N - t) * (N - t - 1)) / (N * (N - 1)) if N > 1 else 0.0
    one_missing = 2 * t * (N - t) / (N * (N - 1)) if N > 1 else 0.0
    alpha, beta = habits.single, habits.foreseen
    of_one = (1 - t / N) * (1 - beta)
    of_two = both_missing * (2 * (1 - beta) + beta) + one_missing * (1 - beta)
    return alpha * of_one + (1 - alpha) * of_two


def cost_table(layers: Sequence[LayerHabits], *, num_experts: int) -> Costs:
    """The expected loads of all layers with 0 to N slots, [L, N + 1]."""
    return np.array(
        [
            [
                expected_loads(habits, num_experts=num_experts, num_cached=t)
                for t in range(num_experts + 1)
            ]
            for habits in layers
        ]
    )


def greedy_sizes(costs: Costs, num_slots: int, *, least: int = 0) -> tuple[int, ...]:
    """The same by giving each slot where it gains most: exact where costs are convex, the check of
    `best_sizes`, and quick for any number of slots."""
    num_layers, most = costs.shape[0], costs.shape[1] - 1
    sizes = [least] * num_layers
    left = min(num_slots, num_layers * most) - num_layers * least
    gains = [(costs[i, least + 1] - costs[i, least], i) for i in range(num_layers) if least < most]
    heapq.heapify(gains)
    for _ in range(left):
        _, i = heapq.heappop(gains)
        sizes[i] += 1
        if sizes[i] < most:
            heapq.heappush(gains, (costs[i, sizes[i] + 1] - costs[i, sizes[i]], i))
    return tuple(sizes)


def total_cost(costs: Costs, sizes: Sequence[int]) -> float:
    """Expected loads of all layers together."""
    return float(sum(costs[layer, size] for layer, size in enumerate(sizes)))
