"""What decides over the scores of what queries see, beside the queries themselves.

Shape letters: T tokens of the micro-batch, H query heads, C head size.
"""

from typing import NamedTuple

from torch import Tensor


class SinkQueries(NamedTuple):
    """Of the keys that each token sees, the first so many, the sinks, are met by other queries."""

    num_sinks: int
    q_THC: Tensor
    """Those of the micro-batch, rotated as if they were nearer."""


class Scoring(NamedTuple):
    """By what scores are multiplied, and what else takes part in their softmax."""

    scale: float
    sinks: SinkQueries | None = None
    sink_scores_H: Tensor | None = None
    """In float32: take part in the softmax of each head as one key more would whose value is
    nothing (gpt-oss; with a score of zero Miller's "softmax one", 2023)."""

    @property
    def is_usual(self) -> bool:
        """Whether each key is met by one query, and each score has a key."""
        return self.sinks is None and self.sink_scores_H is None

    def of_heads(self, heads: slice) -> "Scoring":
        """That of some query heads, where there are no sinks."""
        scores_H = self.sink_scores_H
        return self._replace(sink_scores_H=None if scores_H is None else scores_H[heads])

    def of(self, tokens: Tensor | slice) -> "Scoring":
        if self.sinks is None:
            return self
        return self._replace(sinks=self.sinks._replace(q_THC=self.sinks.q_THC[tokens]))
