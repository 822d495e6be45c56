"""Routing of a recorded trace, for a simulation.

Shape letters: L MoE layers, T tokens, E experts, K experts per token.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moebatch.errors import ConfigError, Fault
from moebatch.predict.predictor import counts_of
from moebatch.predict.trace import RoutingTrace
from moebatch.spec.shape import ModelShape


def load_routing(path: Path, shape: ModelShape) -> "TraceRouting":
    """The trace of a file, for a model of that shape.

    Raises CheckpointError for a damaged file and ConfigError for one of another model.
    """
    trace = RoutingTrace.load(path)
    found = trace.moe_layers, trace.num_experts, trace.experts_per_token
    if found != (tuple(shape.moe_layers), shape.num_experts, shape.experts_per_token):
        message = (
            f"is of a model with {len(trace.moe_layers)} layers of {trace.num_experts} experts, "
            f"{trace.experts_per_token} per token; this one has {len(shape.moe_layers)} of "
            f"{shape.num_experts}, {shape.experts_per_token} per token"
        )
        raise ConfigError([Fault(file=str(path), message=message)])
    return TraceRouting(trace)


class TraceRouting:
    """Tokens of a trace one behind the other, from the start again when they are used up."""

    def __init__(self, trace: RoutingTrace) -> None:
        self._layers = {layer: place for place, layer in enumerate(trace.moe_layers)}
        self._num_experts = trace.num_experts
        self._experts_LTK = np.concatenate([one.experts_LTK for one in trace], axis=1)
        # A token never chooses an expert twice, so these are chances.
        self._chances_LE = np.array(
            [counts_of(of, trace.num_experts) / len(of) for of in self._experts_LTK]
        )

    def rows(self, number: int, layer: int, micro_batch: int, tokens: float) -> NDArray[np.float64]:
        """Tokens of each expert, [E]; every micro-batch of every pass takes tokens of its own, the
        same in all layers."""
        of_layer = self._experts_LTK[self._layers[layer]]
        count = max(1, round(tokens))
        first = int(np.random.default_rng((number, micro_batch)).integers(len(of_layer)))
        taken = np.arange(first, first + min(count, len(of_layer))) % len(of_layer)
        return counts_of(of_layer[taken], self._num_experts) * (count / len(taken))

    def chances(self, layer: int) -> NDArray[np.float64]:
        """With what chance a token of the trace chooses each expert, [E]; K in all."""
        chances_E: NDArray[np.float64] = self._chances_LE[self._layers[layer]]
        return chances_E
