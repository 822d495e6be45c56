"""Queries as they meet the first tokens of their sequences, the sinks.

Shape letters: T tokens of the micro-batch, H query heads, C head size.
"""

from typing import NamedTuple

from torch import Tensor


class SinkQueries(NamedTuple):
    """Of the keys that each token sees, the first so many are met by other queries."""

    num_sinks: int
    q_THC: Tensor
    """Those of the micro-batch, rotated as if they were nearer."""

    def of(self, tokens: Tensor | slice) -> "SinkQueries":
        """Those of some tokens."""
        return SinkQueries(self.num_sinks, self.q_THC[tokens])
