"""What is guessed of tokens before they are known: those that follow the last ones of a pass.

Shape letters: T tokens of the next pass, N sequences that end in a pass, M of them that go on in
the next one, R rows, D hidden, E experts.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.arrays import Floats
from moebatch.predict.guesser import Shares, SharesByToken
from moebatch.predict.predictor import PassTokens

_Name = tuple[int, int, int]
"""Of a token: its request, which of the answers to it, and the position in that."""


class GuessedShares(dict[int, Shares | SharesByToken]):
    """What is guessed of some tokens, by position, [T, E]; rows of which nothing is guessed are not
    numbers. Of several guesses the last one holds: it comes from nearer by."""

    def put(
        self,
        position: int,
        num_tokens: int,
        rows: slice | NDArray[np.intp],
        shares_RE: Shares | SharesByToken,
    ) -> None:
        """Some of the tokens choose like that."""
        if isinstance(shares_RE, SharesByToken) and len(shares_RE.tokens_R) == num_tokens:
            self[position] = shares_RE  # looked up when they are asked for
            return
        guessed_RE = shares_RE[:]
        if position not in self:
            self[position] = np.full((num_tokens, guessed_RE.shape[1]), np.nan, np.float32)
        self[position] = all_TE = self[position][:]
        all_TE[rows] = guessed_RE


class Successors:
    """Of the tokens behind which the next one of their sequence is not known yet."""

    def __init__(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        """Those of a pass; without `tokens` there is one behind each of its rows."""
        last_T = np.ones(num_rows, np.bool_) if tokens is None else tokens.is_last_T
        self._ends_N = np.flatnonzero(last_T)
        self._names: dict[_Name, int] = {}
        if tokens is not None:
            names = _names(tokens, self._ends_N, later=1)
            self._names = {name: end for end, name in enumerate(names)}
        self._shares = GuessedShares()
        self._seen_ND: Tensor | None = None

    def guess(self, position: int, rows: slice, shares_RE: Shares | SharesByToken) -> None:
        """What those behind some rows will choose at a position."""
        ours = self._behind(rows)
        of_ours = shares_RE[self._ends_N[ours] - rows.start]
        self._shares.put(position, len(self._ends_N), ours, of_ours)

    def see(self, rows: slice, hidden_RD: Tensor) -> None:
        """What the last gate of the pass has seen of the tokens before them."""
        ours = self._behind(rows)
        if self._seen_ND is None:
            self._seen_ND = torch.zeros(len(self._ends_N), hidden_RD.shape[1])
        places = torch.from_numpy(self._ends_N[ours] - rows.start)
        self._seen_ND[ours] = hidden_RD[places.to(hidden_RD.device)].float().cpu()

    def is_guessed(self, position: int) -> bool:
        """Whether anything is guessed about a layer."""
        return position in self._shares

    def expected(self, position: int) -> Floats:
        """How many of them are expected to choose each expert of a guessed layer, [E]."""
        expected_E: Floats = np.nansum(self._shares[position][:], axis=0, dtype=np.float64)
        return expected_E

    def shares(self, tokens: PassTokens) -> GuessedShares:
        """What was guessed of the tokens of the next pass."""
        rows_M, ends_M = self._found_in(tokens)
        found = GuessedShares()
        for position, shares_NE in self._shares.items():
            found.put(position, len(tokens.tokens_T), rows_M, shares_NE[ends_M])
        return found

    def before(self, tokens: PassTokens, rows: slice) -> Tensor | None:
        """What was seen of the token before each of some rows of the next pass, [R, D]; zeros where
        that is not known, None if nothing is."""
        if self._seen_ND is None:
            return None
        rows_M, ends_M = self._found_in(tokens)
        is_asked_M = (rows_M >= rows.start) & (rows_M < rows.stop)
        places, ends = rows_M[is_asked_M] - rows.start, ends_M[is_asked_M]
        before_RD = torch.zeros(rows.stop - rows.start, self._seen_ND.shape[1])
        before_RD[torch.from_numpy(places)] = self._seen_ND[torch.from_numpy(ends)]
        return before_RD

    def _behind(self, rows: slice) -> slice:
        """Those that follow tokens of some rows."""
        first, last = np.searchsorted(self._ends_N, (rows.start, rows.stop))
        return slice(int(first), int(last))

    def _found_in(self, tokens: PassTokens) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows of the next pass, and who of these each is, [M] and [M]."""
        starts = np.flatnonzero(tokens.is_first_T)
        names = _names(tokens, starts)
        ends_N = np.array([self._names.get(name, -1) for name in names], np.intp)
        return starts[ends_N >= 0], ends_N[ends_N >= 0]


def _names(tokens: PassTokens, rows_R: NDArray[np.intp], *, later: int = 0) -> Iterator[_Name]:
    """Of the tokens of some rows, or of those so many positions behind them."""
    return zip(
        tokens.requests_T[rows_R].tolist(),
        tokens.choices_T[rows_R].tolist(),
        (tokens.positions_T[rows_R] + later).tolist(),
        strict=True,
    )
