"""How surely a model expects the tokens of texts that it reads, from passes like those of jobs.

Shape letters: T tokens of the pass, S tokens of all texts, R rows of one block, D hidden.
"""

from collections.abc import Sequence
from math import exp

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model.decoder import Decoder
from moebatch.predict.predictor import PassTokens


class TextLosses:
    """Losses of tokens, one each, in whatever order passes compute them. Tokens that several texts
    begin with may be computed, and count, once."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        """Requests are `texts`, by their indices."""
        lengths = [len(text) for text in texts]
        self._tokens_S = np.array([token for text in texts for token in text], np.int64)
        self._starts = np.cumsum([0, *lengths[:-1]])
        self._is_last_S = np.zeros(len(self._tokens_S), np.bool_)
        self._is_last_S[np.cumsum(lengths) - 1] = True
        self._losses_S = np.full(len(self._tokens_S), np.nan)
        """Of the token behind each, in nats."""

    def add(self, decoder: Decoder, x_TD: Tensor, tokens: PassTokens) -> None:
        """Takes in a pass that has gone through all layers."""
        places_T = self._starts[tokens.requests_T] + tokens.positions_T
        rows = np.flatnonzero(~self._is_last_S[places_T])
        at_once = decoder.logits_rows
        for first in range(0, len(rows), at_once):
            block = rows[first : first + at_once]
            places_R = places_T[block]
            expected_R = torch.from_numpy(self._tokens_S[places_R + 1])
            logits_RV = decoder.logits(x_TD[torch.from_numpy(block)]).cpu()
            losses_R = F.cross_entropy(logits_RV.float(), expected_R, reduction="none")
            self._losses_S[places_R] = losses_R.numpy()

    @property
    def num_tokens(self) -> int:
        """Tokens whose loss is known."""
        return int(np.count_nonzero(~np.isnan(self._losses_S)))

    @property
    def perplexity(self) -> float:
        """exp of their mean loss."""
        return exp(float(np.nanmean(self._losses_S)))
