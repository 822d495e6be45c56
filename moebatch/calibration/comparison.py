"""How often a correlation table is right, beside its marginal counts alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebatch.predict.accuracy import LayerAccuracy, accuracy
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.path_table import PathTable
from moebatch.predict.trace import RoutingTrace

GROUP_TOKENS = (1, 64)
"""Accuracy is told for so many tokens at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Accuracy on the held-out text, of the table and of its marginal counts alone."""

    group_tokens: int
    correlation: tuple[LayerAccuracy, ...]
    marginal: tuple[LayerAccuracy, ...]


def compare(table: PathTable, unseen: Sequence[NDArray[np.integer]]) -> tuple[Comparison, ...]:
    """On passes that the table has not counted yet."""
    trace, found = trace_of(unseen, table), []
    for group_tokens in GROUP_TOKENS:
        of_paths, of_marginal = (
            accuracy(CorrelationPredictor(some, learns=False), trace, group_tokens=group_tokens)
            for some in (table, table.shortened(0))
        )
        found.append(
            Comparison(group_tokens=group_tokens, correlation=of_paths, marginal=of_marginal)
        )
    return tuple(found)


def trace_of(passes: Sequence[NDArray[np.integer]], table: PathTable) -> RoutingTrace:
    """Recorded passes of the table's model."""
    return RoutingTrace.of(passes, table.moe_layers, num_experts=table.num_experts)
