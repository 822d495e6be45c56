"""Where the numbers of a pass stopped being numbers: the layer and the expert.

Shape letters: T tokens of the pass, R rows that are looked at, D hidden, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.model.routing.router import Routing


class BrokenRows:
    """Rows of one pass that hold NaN or infinity, and after which step they first did."""

    def __init__(self, *, is_lazy: bool = False) -> None:
        """`is_lazy` is for a GPU, where every look would make the thread wait that launches: what
        is seen stays there until it is asked for."""
        self._is_lazy = is_lazy
        self._places: dict[int, str] = {}
        self._looks: list[_Look] = []

    def look(
        self, x_TD: Tensor, layer: int, routing: Routing | None, rows: slice | None = None
    ) -> None:
        """Takes note of rows that are broken after `layer`, of all or some; nearly free as long
        as none is."""
        part = slice(0, len(x_TD)) if rows is None else rows
        if self._is_lazy:
            self._looks.append(_Look.of(x_TD, layer, routing, part))
        elif self._places or not _is_sound(x_TD[part]):
            self._note(_Look.of(x_TD, layer, routing, part))

    def place_of(self, row: int) -> str:
        """``layer 3, expert 5``; the head where all layers were sound."""
        for look in self._looks:
            self._note(look)
        self._looks.clear()
        return self._places.get(row, "the head")

    def _note(self, look: "_Look") -> None:
        broken_R = (~look.sound_R).nonzero().flatten().tolist()
        for place in broken_R:
            row = look.first_row + place
            if row not in self._places:
                self._places[row] = f"layer {look.layer}" + look.cause(place)


class _Look(NamedTuple):
    """What a step has made of some rows, in a few numbers of each."""

    layer: int
    first_row: int
    sound_R: Tensor
    attended_R: Tensor | None
    """Whether what came from attention was sound; None without experts."""
    sound_RK: Tensor | None
    """The same of what each choice has made of it."""
    experts_RK: Tensor | None

    @classmethod
    def of(cls, x_TD: Tensor, layer: int, routing: Routing | None, rows: slice) -> "_Look":
        sound_R = _are_sound(x_TD[rows])
        if routing is None:
            return cls(layer, rows.start, sound_R, None, None, None)
        return cls(
            layer,
            rows.start,
            sound_R,
            _are_sound(routing.normed_TD[rows]),
            _are_sound(routing.outputs_TKD[rows]),
            routing.experts_TK[rows].to(torch.int16),
        )

    def cause(self, place: int) -> str:
        if self.attended_R is None or self.sound_RK is None or self.experts_RK is None:
            return ""
        if not bool(self.attended_R[place]):
            return ", attention"
        broken = self.experts_RK[place][~self.sound_RK[place]].tolist()
        return "".join(f", expert {expert}" for expert in sorted(broken))


def _is_sound(x: Tensor) -> bool:
    """Whether all numbers are finite. Their sum says so in no time, but may be beyond float16."""
    return bool(x.sum().isfinite()) or all(bool(end.isfinite()) for end in torch.aminmax(x))


def _are_sound(x: Tensor) -> Tensor:
    """Whether all numbers along the last dimension are finite, without room for each of them: on a
    CPU a sum in float32 would take a copy."""
    if x.is_cuda:
        return x.sum(-1, dtype=torch.float32).isfinite()
    low, high = torch.aminmax(x, dim=-1)
    return low.isfinite() & high.isfinite()
