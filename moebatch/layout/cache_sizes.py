"""How a cache of experts is best divided among layers (AdapMoE, section 4.4, Eq. 16).

Shape letters: L MoE layers, N experts of a layer, T slots of all layers together.
"""

import numpy as np

from moebatch.arrays import Floats

Costs = Floats
"""Experts that a token has to wait for in each layer by the slots that the layer has, [L, N + 1]:
convex and falling in the slots."""


def best_sizes(costs: Costs, num_slots: int, *, least: int = 0) -> tuple[int, ...]:
    """Slots of each layer, `least` to N, `num_slots` in all or as many as layers can use, with the
    lowest sum of costs: a knapsack over layers, in O(L T N) (Eq. 16, with k capped at N)."""
    num_layers, most = costs.shape[0], costs.shape[1] - 1
    total = min(num_slots, num_layers * most)
    assert num_layers * least <= total, f"{num_layers} layers of {least} do not go into {total}"
    best_T = np.full(total + 1, np.inf)
    best_T[0] = 0.0
    taken_LT = np.zeros((num_layers, total + 1), np.int64)
    for layer, costs_k in enumerate(costs):
        options_kT = np.full((most + 1, total + 1), np.inf)
        for k in range(least, min(most, total) + 1):
            options_kT[k, k:] = best_T[: total + 1 - k] + costs_k[k]
        taken_LT[layer] = options_kT.argmin(axis=0)
        best_T = options_kT.min(axis=0)
    sizes, left = [], total
    for layer in reversed(range(num_layers)):
        sizes.append(int(taken_LT[layer, left]))
        left -= sizes[-1]
    return tuple(reversed(sizes))


def even_sizes(num_layers: int, num_experts: int, num_slots: int) -> tuple[int, ...]:
    """As many slots for each layer, the first ones having one more."""
    total = min(num_slots, num_layers * num_experts)
    return tuple(total // num_layers + (i < total % num_layers) for i in range(num_layers))
