"""A predictor that looks at every token of a pass, and falls back on frequencies for the rest.

Shape letters: T tokens of the pass, R rows, D hidden, E experts, K experts per token.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moebatch.arrays import Floats
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.guesser import Guess, Guesser, KnownTokens
from moebatch.predict.predictor import Chosen, PassTokens, Predictor
from moebatch.predict.successors import GuessedShares, Successors

if TYPE_CHECKING:
    from torch import Tensor


class GuessingPredictor(Predictor):
    """Ranks experts by how many tokens of the pass are guessed to choose them.

    Of several guesses about a row and a layer the last one holds: it comes from nearer by, and may
    have been made in the pass before. Rows of which nothing is guessed are expected to choose as
    `rest` says. One thread may use it at a time.
    """

    def __init__(
        self, guessers: Sequence[Guesser], rest: CorrelationPredictor, *, moe_layers: Sequence[int]
    ) -> None:
        self._guessers = guessers
        self._rest = rest
        self._position = {layer: position for position, layer in enumerate(moe_layers)}
        self._num_rows = 0
        self._shares = GuessedShares()
        """Of the tokens of the pass."""
        self._next = Successors(0)
        self._num_chosen: dict[int, int] = {}
        self._expected: dict[int, Floats] = {}
        """By position, until something is observed: a layer is asked about more than once."""

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        self._rest.begin_pass(num_rows, tokens)
        self._num_rows = num_rows
        self._num_chosen.clear()
        self._expected.clear()
        before, self._next = self._next, Successors(num_rows, tokens)
        self._shares = GuessedShares() if tokens is None else before.shares(tokens)
        if tokens is not None:
            known = KnownTokens(tokens.tokens_T, tokens.embedded_TD, partial(before.before, tokens))
            for guesser in self._guessers:
                self._take(slice(0, num_rows), guesser.from_tokens(known))

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: "Tensor | None" = None
    ) -> None:
        self._rest.observe(layer, rows, experts_RK, hidden_RD)
        position = self._position[layer]
        self._expected.clear()
        self._num_chosen[position] = rows.stop
        if rows.stop == self._num_rows:
            self._shares.pop(position, None)
        if hidden_RD is not None:
            if position == len(self._position) - 1:
                self._next.see(rows, hidden_RD)
            for guesser in self._guessers:
                self._take(rows, guesser.from_hidden(position, hidden_RD))

    def frequency(self, layer: int) -> Floats:
        return self._rest.frequency(layer)

    def expected(self, layer: int) -> Floats:
        position = self._position[layer]
        if position not in self._expected:
            self._expected[position] = self._newly_expected(layer, position)
        return self._expected[position]

    def _newly_expected(self, layer: int, position: int) -> Floats:
        num_chosen = self._num_chosen.get(position, 0)
        if self._has_chosen_next(position):
            return self._next.expected(position)
        shares_TE = self._shares.get(position)
        if shares_TE is None:
            return self._rest.expected(layer)
        open_RE = shares_TE[num_chosen:]
        is_guessed_R = ~np.isnan(open_RE[:, 0])
        chosen_E = self._rest.chosen(layer)
        expected_E: Floats = chosen_E + open_RE[is_guessed_R].sum(axis=0, dtype=np.float64)
        share_of_rest = 1 - is_guessed_R.mean()
        if share_of_rest:
            expected_E += (self._rest.expected(layer) - chosen_E) * share_of_rest
        return expected_E

    def is_guess(self, layer: int) -> bool:
        """Whether a guesser has looked at tokens that have not chosen there yet."""
        position = self._position[layer]
        is_guessed = position in self._shares or self._has_chosen_next(position)
        return is_guessed or self._rest.is_guess(layer)

    def _has_chosen_next(self, position: int) -> bool:
        """Whether all tokens of the pass have chosen, and something is foreseen of the next."""
        num_chosen = self._num_chosen.get(position, 0)
        return 0 < num_chosen == self._num_rows and self._next.is_guessed(position)

    def _take(self, rows: slice, guesses: Iterable[Guess]) -> None:
        for position, shares_RE, is_next_pass in guesses:
            if is_next_pass:
                self._next.guess(position, rows, shares_RE)
            else:
                self._shares.put(position, self._num_rows, rows, shares_RE)
