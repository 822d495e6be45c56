"""Gates that choose for a later layer (Pre-gated MoE, section 3), and what they have chosen.

Shape letters: T tokens of the pass, R rows, D hidden, E experts, K experts per token, N the
activation level.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moebatch.model.router import count_by_expert
from moebatch.schedule.activation import chosen_ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class PreGates:
    """Gates that stand in for those of later layers: they change what a model answers.

    Of B layers with experts the first B - N have one each, which reads what the experts of its
    layer read. The first N layers choose with their own gates, all others not at all.
    """

    moe_layers: tuple[int, ...]
    activation_level: int
    """N. At 0 every layer chooses with its own gate: there are no pre-gates."""
    gates_ED: Sequence[Tensor]
    """In the order of the layers."""

    def __post_init__(self) -> None:
        assert len(self.gates_ED) == len(self.later), "one for each layer that chooses ahead"

    @classmethod
    def none(cls) -> "PreGates":
        """Every layer chooses with its own gate, as the model says."""
        return cls(moe_layers=(), activation_level=0, gates_ED=())

    @property
    def later(self) -> Mapping[int, int]:
        """By layer, the one for which its pre-gate chooses."""
        return chosen_ahead(self.moe_layers, self.activation_level)

    @property
    def num_bytes(self) -> int:
        """Bytes of all gates."""
        return sum(gate.nbytes for gate in self.gates_ED)

    def of(self, layer: int) -> Tensor:
        """The pre-gate that reads the input of a layer, [E, D]."""
        return self.gates_ED[self.moe_layers.index(layer)]

    def to(self, device: torch.device, dtype: torch.dtype) -> "PreGates":
        """The same where they are computed with."""
        return replace(self, gates_ED=[gate.to(device, dtype) for gate in self.gates_ED])


class ChoicesAhead:
    """What pre-gates have chosen, by row of the pass, until the layer that it is for is routed.

    Rows may be in different layers at a time. There is room for one choice more of each row than
    lies between two layers of which one chooses for the other: what is kept for a layer has to be
    read before the layer chooses ahead.
    """

    def __init__(self, pregates: PreGates, weights_TK: Tensor, experts_TK: Tensor) -> None:
        """Rows are as many as those of the two tensors, which are for the layer in work."""
        self._pregates = pregates
        self._later = pregates.later
        self._chosen_earlier = frozenset(self._later.values())
        level = pregates.activation_level
        self._weights_NTK = weights_TK.new_empty(level, *weights_TK.shape)
        self._experts_NTK = experts_TK.new_empty(level, *experts_TK.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return self._weights_NTK.nbytes + self._experts_NTK.nbytes

    def kept(self, layer: int, rows: slice) -> tuple[Tensor, Tensor] | None:
        """Weights and experts [R, K] that were chosen earlier for a layer; None if the layer has a
        gate of its own."""
        return self._of(layer, rows) if layer in self._chosen_earlier else None

    def gate(self, layer: int) -> Tensor | None:
        """The pre-gate that reads the input of a layer, [E, D]; None if it has none."""
        return self._pregates.of(layer) if layer in self._later else None

    def room(self, layer: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Where weights and experts [R, K] go that the pre-gate of a layer chooses."""
        return self._of(self._later[layer], rows)

    def experts(self, layer: int, rows: slice) -> tuple[int, ...]:
        """Experts that the pre-gate of a layer has chosen for rows, ascending; waits for a GPU to
        know them. None of them if there is no such gate."""
        gate_ED = self.gate(layer)
        if gate_ED is None:
            return ()
        _, experts_RK = self.room(layer, rows)
        return tuple(count_by_expert(experts_RK, len(gate_ED)))

    def _of(self, layer: int, rows: slice) -> tuple[Tensor, Tensor]:
        place = self._pregates.moe_layers.index(layer) % self._pregates.activation_level
        return self._weights_NTK[place, rows], self._experts_NTK[place, rows]
