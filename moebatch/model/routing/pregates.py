"""Gates that choose for a later layer (Pre-gated MoE, section 3), and what they have chosen.

Shape letters: T tokens of the pass, R rows, D hidden, E experts, K experts per token, N the
activation level.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moebatch.model.dense_weights import DenseWeights
from moebatch.model.routing.tokens import count_by_expert
from moebatch.schedule.setup import chosen_ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class PreGates:
    """Gates in the place of a model's own, which change what it answers.

    Each layer with experts has one that chooses for it. Those of the first N read what the experts
    of their own layer read, the others what those of the layer read that is N such layers earlier.
    """

    activation_level: int
    """N, at least 1 and less than there are layers with experts."""
    moe_layers: tuple[int, ...]
    gates_ED: Sequence[Tensor]
    """By the layers for which they choose."""

    def __post_init__(self) -> None:
        assert 0 < self.activation_level < len(self.moe_layers), "some gates choose ahead"
        assert len(self.gates_ED) == len(self.moe_layers), "one for each layer with experts"

    @property
    def fingerprint(self) -> str:
        """Stands for every number of the gates and for what they read."""
        digest = hashlib.blake2b(str(self.activation_level).encode(), digest_size=8)
        for gate_ED in self.gates_ED:
            digest.update(gate_ED.float().numpy().tobytes())
        return digest.hexdigest()

    def replace_routers(self, weights: DenseWeights) -> None:
        """Writes the gates over the model's own, in their dtype and on their device."""
        for layer, gate_ED in zip(self.moe_layers, self.gates_ED, strict=True):
            weights.layers[layer]["router"].copy_(gate_ED)


class ChoicesAhead:
    """What gates have chosen for later layers, by row of the pass, until those are routed.

    Rows may be in different layers at a time. N choices of each row are kept, so what is kept for a
    layer has to be read before the gate that reads the layer's input chooses.
    """

    def __init__(
        self,
        moe_layers: Sequence[int],
        activation_level: int,
        weights_TK: Tensor,
        experts_TK: Tensor,
    ) -> None:
        """Rows are as many as those of the two tensors, which are for the layer in work. Nothing is
        chosen ahead at level 0."""
        self._later = chosen_ahead(moe_layers, activation_level)
        self._chosen_earlier = frozenset(self._later.values())
        level = activation_level
        self._places = {layer: i % level for i, layer in enumerate(moe_layers) if level}
        self._weights_NTK = weights_TK.new_empty(level, *weights_TK.shape)
        self._experts_NTK = experts_TK.new_empty(level, *experts_TK.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return self._weights_NTK.nbytes + self._experts_NTK.nbytes

    def later(self, layer: int) -> int | None:
        """The layer whose gate reads the input of this one; None if it is this one's alone."""
        return self._later.get(layer)

    def is_chosen_earlier(self, layer: int) -> bool:
        """Whether the gate of a layer reads the input of another one."""
        return layer in self._chosen_earlier

    def kept(self, layer: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Weights and experts [R, K] of a layer that is chosen for by an earlier one."""
        place = self._places[layer]
        return self._weights_NTK[place, rows], self._experts_NTK[place, rows]

    def experts(self, layer: int, rows: slice, num_experts: int) -> tuple[int, ...]:
        """Experts that rows have chosen at a layer for a later one, ascending; waits for a GPU to
        know them. None of them where nothing is chosen ahead."""
        later = self.later(layer)
        if later is None:
            return ()
        _, experts_RK = self.kept(later, rows)
        return tuple(count_by_expert(experts_RK, num_experts))
