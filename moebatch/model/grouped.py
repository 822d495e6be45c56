"""Experts that are computed together, as the decoder asks for them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from moebatch.formats.weight_format import Matrix
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import ExpertTokens
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate


class GroupedExpert(NamedTuple):
    """One of a group."""

    tokens: ExpertTokens
    matrices: Any
    """As `ExpertKernels.taken` gave them."""


class ExpertKernels(Protocol):
    """Kernels that compute experts together."""

    def taken(self, matrices: Mapping[str, Matrix], dtype: torch.dtype) -> Any:
        """The matrices of an expert, if it can be one of a group over rows of `dtype`; None of
        others."""

    def suits(self, taken: Any, num_rows: int) -> bool:
        """Whether an expert of which this was taken is one of a group over so many rows."""

    def run(
        self,
        frame: Frame,
        experts: Sequence[GroupedExpert],
        routing: Routing,
        *,
        most_rows: int,
        clamped: ClampedGate | None = None,
    ) -> None:
        """Fills the ``outputs_TKD`` of the experts, whose gates may be clamped, with room for the
        inner numbers of `most_rows` rows at a time."""
