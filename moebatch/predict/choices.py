"""What the tokens of one pass have chosen so far.

Shape letters: L MoE layers, T tokens of the pass, R rows of a micro-batch, K experts per token.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moebatch.predict.predictor import Chosen

ExpertNumbers = NDArray[np.uint16]


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
        """Takes in what those rows have chosen."""
        assert rows.start == self._chosen[position], "micro-batches of a layer come in order"
        assert rows.stop <= self.num_rows, f"the pass has {self.num_rows} rows, not {rows.stop}"
        self._experts_LTK[position, rows] = experts_RK
        self._chosen[position] = rows.stop

    def num_chosen(self, position: int) -> int:
        """Rows, from the first on, whose gate has chosen there."""
        return self._chosen[position]

    def of(self, position: int, rows: slice) -> ExpertNumbers:
        """What those rows have chosen there, [R, K]."""
        assert rows.stop <= self._chosen[position], "the gate has not chosen for these rows"
        return self._experts_LTK[position, rows]

    @property
    def is_complete(self) -> bool:
        """Whether all gates have chosen for all rows."""
        return self.num_rows > 0 and all(rows == self.num_rows for rows in self._chosen)

    @property
    def experts_LTK(self) -> ExpertNumbers:
        """The whole pass, once it is complete. Valid until the next one begins."""
        assert self.is_complete, "some gates have not chosen yet"
        return self._experts_LTK[:, : self.num_rows]
