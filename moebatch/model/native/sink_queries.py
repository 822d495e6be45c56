"""Queries as they meet the first tokens of their sequences, the sinks.

Shape letters: T tokens of the micro-batch, H query heads, C head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SinkQueries(NamedTuple):
    """Of the keys that each token sees, the first so many are met by other queries."""

    num_sinks: int
    q_THC: Tensor
    """Those of the micro-batch, rotated as if they were nearer."""

    def of(self, tokens: Tensor | slice) -> "SinkQueries":
        """Those of some tokens."""
        return SinkQueries(self.num_sinks, self.q_THC[tokens])

    def with_queries(self, q_THC: Tensor) -> "SinkQueries":
        """The same in another order, or as part of a batch."""
        return SinkQueries(self.num_sinks, q_THC)


def address_of(sink_scores_H: Tensor | None, num_heads: int) -> int | None:
    """Of the scores that take part in the softmax of each head; None where there are none."""
    if sink_scores_H is None:
        return None
    assert sink_scores_H.dtype == torch.float32 and sink_scores_H.shape == (num_heads,)
    assert sink_scores_H.is_contiguous() and sink_scores_H.device.type == "cpu"
    return sink_scores_H.data_ptr()
