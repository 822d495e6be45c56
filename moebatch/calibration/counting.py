"""Counts a text that was read, and looks at the table on the way.

Shape letters: L MoE layers, T tokens of a portion, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebatch.calibration.comparison import Comparison, compare
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import Chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What counting has shown by the way."""

    popular_LE: NDArray[np.integer]
    """How often each expert was chosen in what is not held out."""
    comparisons: tuple[Comparison, ...]
    """What the table foresaw of what is held out; empty if nothing is."""


def count(table: PathTable, known: Sequence[Chosen], unseen: Sequence[Chosen]) -> Counted:
    """Counts portions, [L, T, K] each; those held out once the table was asked what it foresees."""
    for experts_LTK in known:
        table.add_pass(experts_LTK)
    popular_LE = table.counts[0][:, 0].copy()
    comparisons = compare(table, unseen) if unseen else ()
    for experts_LTK in unseen:
        table.add_pass(experts_LTK)
    return Counted(popular_LE=popular_LE, comparisons=comparisons)
