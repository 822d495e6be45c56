"""How many kernels and copies go through rows of hidden states, between products.

Counted operator by operator, as `launches.py` counts those of tasks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from moebatch.spec.model.blocks import Residual
from moebatch.spec.model.shape import ModelShape


class _Kernels(NamedTuple):
    """Launches of each."""

    norm: int
    norm_gated: int
    rotation: int
    """Of queries, and of keys."""
    gate: int
    clamping: int
    """What else a gate does that clamps."""
    place: int
    """What an expert has made is weighed and put back."""
    add: int
    """Outputs of experts are summed, with those of a shared one, and added."""
    sum: int
    """The same for a norm."""


_BY_TORCH = _Kernels(norm=9, norm_gated=11, rotation=12, gate=2, clamping=6, place=5, add=3, sum=3)
"""A norm: into float32, sum of squares, five for its root, back, times the weight. A gated one is
in float32 already, and is multiplied by silu of its gate there. A rotation: six for queries, and
for keys."""
_FUSED = _Kernels(norm=1, norm_gated=1, rotation=2, gate=1, clamping=0, place=1, add=1, sum=2)
_LAYER_NORM = 11
"""Without a bias."""
_MERGED = 15
"""Streams of hidden states, before a part of a layer."""
_SPREAD = 22
"""What it makes, over them: with how they are mixed as it is at first."""
_SPREAD_UNMIXED = 16
"""The same, over streams that are not mixed with each other."""
_WEIGHED = 6
"""What a norm has made: two products, what follows each, a copy, and what is weighed."""
_MIXED = 8
"""Hidden states with what a part of a layer has made: into float32, four for what is left of them,
both products, and back."""
_BALANCING = 6
"""Of its rows and columns, once more."""


@dataclass(frozen=True)  # no slots: what follows from them is worked out once
class RowLaunches:
    """Those of a model on a GPU; of tasks that a CPU does they say nothing."""

    shape: ModelShape
    is_fused: bool
    """Kernels in Triton go through rows, and compute experts of few rows together."""

    @property
    def _rows(self) -> _Kernels:
        return _FUSED if self.is_fused else _BY_TORCH

    @property
    def _norm(self) -> int:
        norm = self.shape.norm
        return _LAYER_NORM + norm.has_bias if norm.kind == "layer" else self._rows.norm

    def _before(self, role: str, *, has_experts: bool = False) -> int:
        """A norm of hidden states, or without it a copy; of streams, when they are merged."""
        norm = self._norm + self._weighed(role, has_experts) if role in self.shape.norms else 1
        return self._merged + norm

    def _weighed(self, role: str, has_experts: bool) -> int:
        """What becomes of what the norm makes, in layers with experts or without."""
        gates = self.shape.norm_gates
        if gates is None:
            return 0
        return _WEIGHED * (role in gates.roles + gates.moe_roles * has_experts)

    @property
    def _merged(self) -> int:
        return _MERGED * (self.shape.streams is not None)

    @property
    def _spread(self) -> int:
        streams = self.shape.streams
        if streams is None:
            return 0
        if streams.num_balancings is None:
            return _SPREAD_UNMIXED
        return _SPREAD + _BALANCING * (streams.num_balancings - 1)

    def _norm_made(self, role: str) -> int:
        """A norm of what has been made, if layers have it; weights may be multiplied before."""
        shape = self.shape
        is_weighed_first = shape.out_norms is not None and not shape.is_unweighed(role)
        return (self._norm + is_weighed_first) * (role in (*shape.norms, *shape.moe_norms))

    def _residual(self, residual: Residual) -> int:
        """What becomes of hidden states, and of what is added to them, before; where they are
        mixed, in place of the sum."""
        if residual.mixing is not None:
            return _MIXED - 1
        kept = residual.keeps_normed + (residual.kept != 1)
        return kept + (residual.added != 1 and not self.is_fused)
