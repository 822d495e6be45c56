"""Where the numbers of a pass stopped being numbers: the layer and the expert.

Shape letters: T tokens of the pass, D hidden, K experts per token.
"""

from torch import Tensor

from moebatch.model.router import Routing


class BrokenRows:
    """Rows of one pass that hold NaN or infinity, and after which step they first did."""

    def __init__(self) -> None:
        self._places: dict[int, str] = {}

    def look(
        self, x_TD: Tensor, layer: int, routing: Routing | None, rows: slice | None = None
    ) -> None:
        """Takes note of rows that are broken after `layer`, of all or some; nearly free as long
        as none is."""
        part = slice(0, len(x_TD)) if rows is None else rows
        if not self._places and bool(x_TD[part].sum().isfinite()):
            return
        broken = ~x_TD[part].isfinite().all(-1)
        for row in (broken.nonzero().flatten() + part.start).tolist():
            if row not in self._places:
                self._places[row] = f"layer {layer}" + _cause(routing, row)

    def place_of(self, row: int) -> str:
        """``layer 3, expert 5``; the head where all layers were sound."""
        return self._places.get(row, "the head")


def _cause(routing: Routing | None, row: int) -> str:
    if routing is None:
        return ""
    if not bool(routing.normed_TD[row].isfinite().all()):
        return ", attention"
    sound_K = routing.outputs_TKD[row].isfinite().all(-1)
    experts = [
        expert
        for expert, (rows_M, choices_M) in routing.tokens.items()
        if not bool(sound_K[choices_M[rows_M == row]].all())
    ]
    return "".join(f", expert {expert}" for expert in experts)
