"""Prediction from what tokens have chosen in the layers before (Klotski, section on hot experts).

Shape letters: L MoE layers, T tokens of the pass, R rows, E experts, K experts per token, P paths.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moebatch.arrays import Floats
from moebatch.predict.path_table import PathTable, path_codes
from moebatch.predict.predictor import Chosen, PassTokens, Predictor, counts_of

if TYPE_CHECKING:
    from torch import Tensor

MAX_LEARNT_ROWS = 512
"""Of a larger micro-batch so many rows, evenly taken, are counted while a job runs."""


class CorrelationPredictor(Predictor):
    """Ranks experts by how often the paths that tokens have taken led to them: the weight of each
    path goes to its followers in proportion.

    Paths of length 0 make it a predictor of marginal counts, which looks at no other layer. Where
    the layer before has not chosen yet, what is expected of it stands in for it. One thread may use
    it at a time.
    """

    def __init__(self, table: PathTable, *, learns: bool = True) -> None:
        """`learns` counts what is observed into `table`, in memory only."""
        self._table = table
        self._learns = learns
        self._choices = Choices(table.moe_layers, experts_per_token=table.experts_per_token)
        self._rest: dict[int, Floats] = {}

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        self._choices.begin_pass(num_rows)
        self._rest.clear()

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: "Tensor | None" = None
    ) -> None:
        position = self._choices.position(layer)
        self._choices.add(position, rows, experts_RK)
        self._rest.clear()
        if self._learns:
            step = -(-(rows.stop - rows.start) // MAX_LEARNT_ROWS)
            some = slice(rows.start, rows.stop, step or 1)
            before = self._before(position, some)
            self._table.add(position, before, self._choices.of(position, some))

    def frequency(self, layer: int) -> Floats:
        position = self._choices.position(layer)
        found: Floats = self._table.counts[0][position, 0].astype(np.float64)
        return found

    def expected(self, layer: int) -> Floats:
        return self.chosen(layer) + self._expected_of_rest(self._choices.position(layer))

    def is_guess(self, layer: int) -> bool:
        """Whether tokens have chosen in the layer before and not in this one."""
        position = self._choices.position(layer)
        if position == 0 or self._table.path_length == 0:
            return False
        return self._choices.num_chosen(position - 1) > self._choices.num_chosen(position)

    def chosen(self, layer: int) -> Floats:
        """How many tokens of the pass have chosen each expert so far, [E]."""
        position = self._choices.position(layer)
        chosen = self._choices.of(position, slice(0, self._choices.num_chosen(position)))
        return counts_of(chosen, self._table.num_experts)

    def _expected_of_rest(self, position: int) -> Floats:
        """The same, of the tokens whose gate has not chosen there."""
        if position not in self._rest:
            num_left = self._choices.num_rows - self._choices.num_chosen(position)
            if position == 0 or self._table.path_length == 0:
                num_choices = num_left * self._table.experts_per_token
                weights = np.array([float(num_choices)])
                self._rest[position] = self._led_to(position, weights, length=0)
            else:
                self._rest[position] = self._from_layer_before(position)
        return self._rest[position]

    def _from_layer_before(self, position: int) -> Floats:
        known = slice(self._choices.num_chosen(position), self._choices.num_chosen(position - 1))
        expected = np.zeros(self._table.num_experts)
        if known.stop > known.start:
            before = self._before(position, known)
            codes = path_codes(before, self._table.num_experts, known.stop - known.start)
            num_paths = self._table.num_experts ** len(before)
            weights = np.bincount(codes.reshape(-1), minlength=num_paths).astype(np.float64)
            # All paths of a token together stand for its K choices.
            weights *= self._table.experts_per_token / codes.shape[1]
            expected += self._led_to(position, weights, length=len(before))
        if self._choices.num_rows > max(known.stop, known.start):
            weights = self._expected_of_rest(position - 1)
            expected += self._led_to(position, weights, length=1)
        return expected

    def _led_to(self, position: int, weights_P: Floats, *, length: int) -> Floats:
        """Where paths of that length lead; the weight of one never taken goes by shorter ones."""
        table, expected = self._table, np.zeros(self._table.num_experts)
        left_P = weights_P.copy()
        for shorter in range(length, -1, -1):
            paths = np.flatnonzero(left_P)
            counts_PE = table.counts[shorter][position, paths]
            seen = counts_PE.any(axis=1)
            times_P1 = counts_PE[seen].sum(axis=1, keepdims=True, dtype=np.float64)
            expected += left_P[paths[seen]] @ (counts_PE[seen] / times_P1)
            left_P[paths[seen]] = 0.0
            if shorter:
                left_P = left_P.reshape(table.num_experts, -1).sum(axis=0)
        expected += left_P[0] / table.num_experts
        return expected

    def _before(self, position: int, rows: slice) -> list[Chosen]:
        """What those rows have chosen at the layers before, as far as paths reach, oldest first."""
        first = max(0, position - self._table.path_length)
        return [self._choices.of(earlier, rows) for earlier in range(first, position)]


class Choices:
    """Choices of all tokens of a pass at all MoE layers, filled while the pass runs."""

    def __init__(self, moe_layers: Sequence[int], *, experts_per_token: int) -> None:
        self.moe_layers = tuple(moe_layers)
        self.num_rows = 0
        self._position = {layer: position for position, layer in enumerate(moe_layers)}
        self._chosen = [0] * len(self.moe_layers)
        self._experts_LTK = np.empty((len(self.moe_layers), 0, experts_per_token), np.uint16)

    def begin_pass(self, num_rows: int) -> None:
        """Forgets everything and makes room for so many tokens."""
        num_layers, room, num_choices = self._experts_LTK.shape
        self.num_rows = num_rows
        self._chosen = [0] * num_layers
        if num_rows > room:
            self._experts_LTK = np.empty((num_layers, num_rows, num_choices), np.uint16)

    def position(self, layer: int) -> int:
        """Place of a layer among those with experts."""
        assert layer in self._position, f"layer {layer} has no experts"
        return self._position[layer]

    def add(self, position: int, rows: slice, experts_RK: Chosen) -> None:
        assert rows.start == self._chosen[position], "micro-batches of a layer come in order"
        assert rows.stop <= self.num_rows, f"the pass has {self.num_rows} rows, not {rows.stop}"
        self._experts_LTK[position, rows] = experts_RK
        self._chosen[position] = rows.stop

    def num_chosen(self, position: int) -> int:
        """Rows, from the first on, whose gate has chosen there."""
        return self._chosen[position]

    def of(self, position: int, rows: slice) -> NDArray[np.uint16]:
        """What those rows have chosen there, [R, K]."""
        assert rows.stop <= self._chosen[position], "the gate has not chosen for these rows"
        return self._experts_LTK[position, rows]
