"""Counts a text that was read, and looks on the way how often the table is right, beside its
marginal counts alone.

Shape letters: L MoE layers, T tokens of a portion, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebatch.predict.accuracy import LayerAccuracy, accuracy
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import Chosen
from moebatch.predict.trace import RoutingTrace

GROUP_TOKENS = (1, 64)
"""Accuracy is measured for so many tokens at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Accuracy on the held-out text, of the table and of its marginal counts alone."""

    group_tokens: int
    correlation: tuple[LayerAccuracy, ...]
    marginal: tuple[LayerAccuracy, ...]


def _compared(table: PathTable, unseen: Sequence[Chosen]) -> tuple[Comparison, ...]:
    """On passes that the table has not counted yet."""
    trace, found = trace_of(unseen, table), []
    for group_tokens in GROUP_TOKENS:
        of_paths, of_marginal = (
            accuracy(CorrelationPredictor(some, learns=False), trace, group_tokens=group_tokens)
            for some in (table, table.without_paths())
        )
        found.append(
            Comparison(group_tokens=group_tokens, correlation=of_paths, marginal=of_marginal)
        )
    return tuple(found)


def trace_of(passes: Sequence[Chosen], table: PathTable) -> RoutingTrace:
    """Recorded passes of the table's model."""
    return RoutingTrace.of(passes, table.moe_layers, num_experts=table.num_experts)


def count(
    table: PathTable, known: Sequence[Chosen], unseen: Sequence[Chosen]
) -> tuple[NDArray[np.integer], tuple[Comparison, ...]]:
    """Counts portions, [L, T, K] each; those held out once the table was asked what it foresees.

    Returns how often each expert was chosen in what is not held out, [L, E], and what the table
    foresaw of what is; empty if nothing is.
    """
    for experts_LTK in known:
        table.add_pass(experts_LTK)
    popular_LE = table.counts[0][:, 0].copy()
    comparisons = _compared(table, unseen) if unseen else ()
    for experts_LTK in unseen:
        table.add_pass(experts_LTK)
    return popular_LE, comparisons
