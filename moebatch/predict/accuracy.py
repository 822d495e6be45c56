"""How often predictions come true, on passes that were recorded.

Shape letters: T tokens of a group, E experts, K experts per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moebatch.arrays import Floats
from moebatch.predict.predictor import Chosen, Predictor, counts_of
from moebatch.predict.trace import RoutingTrace

_MOST_GROUPS = 256
"""So many groups, evenly taken, are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAccuracy:
    """Of the K experts of a layer that were predicted to be hot, shares from 0 to 1."""

    layer: int
    took_part: float
    """Chosen by at least one token."""
    hot: float
    """Among the K that were chosen most; an expert that ties with the last of these counts."""


def accuracy(
    predictor: Predictor, trace: RoutingTrace, *, group_tokens: int
) -> tuple[LayerAccuracy, ...]:
    """Plays groups of tokens to the predictor, layer by layer, each group as a pass of its own.

    Before the gate of a layer chooses, the first K of its ranking are what is predicted. With
    groups of one token both shares are the accuracy for a single sequence.
    """
    layers, K = trace.moe_layers, trace.experts_per_token
    found = np.zeros((len(layers), 2))
    num_groups = 0
    for group_LTK in _groups(trace, group_tokens):
        num_groups += 1
        num_rows = group_LTK.shape[1]
        predictor.begin_pass(num_rows)
        for position, (layer, experts_TK) in enumerate(zip(layers, group_LTK, strict=True)):
            counts_E = counts_of(experts_TK, trace.num_experts)
            found[position] += _shares(counts_E, predictor.rank(layer)[:K])
            predictor.observe(layer, slice(0, num_rows), experts_TK)
    assert num_groups, "a trace has at least one token"
    return tuple(
        LayerAccuracy(layer=layer, took_part=took_part / num_groups, hot=hot / num_groups)
        for layer, (took_part, hot) in zip(layers, found.tolist(), strict=True)
    )


def mean_accuracy(layers: tuple[LayerAccuracy, ...]) -> tuple[float, float]:
    """Mean over the layers of what took part and of what was hot."""
    took_part = sum(layer.took_part for layer in layers) / len(layers)
    return took_part, sum(layer.hot for layer in layers) / len(layers)


def _shares(counts_E: Floats, predicted: list[int]) -> tuple[float, float]:
    least_hot = max(1, int(np.sort(counts_E)[-len(predicted)]))
    took_part = counts_E[predicted] > 0
    return float(took_part.mean()), float((counts_E[predicted] >= least_hot).mean())


def _groups(trace: RoutingTrace, group_tokens: int) -> Iterator[Chosen]:
    """Groups of so many tokens of one pass; passes with fewer are groups themselves."""
    starts = [
        (number, start)
        for number, experts_LTK in enumerate(trace.passes)
        for start in range(0, max(1, experts_LTK.shape[1] - group_tokens + 1), group_tokens)
    ]
    for number, start in starts[:: -(-len(starts) // _MOST_GROUPS)]:
        yield trace.passes[number][:, start : start + group_tokens]
