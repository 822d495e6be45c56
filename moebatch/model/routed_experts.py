"""Experts over the tokens that chose them: together where kernels do that, else one by one.

Shape letters: N rows after bucketing, M tokens of one expert, T tokens of the pass, K experts per
token, D hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moebatch.errors import CheckpointError
from moebatch.formats.weight_format import BadParts, Matrix
from moebatch.layout.scratch import Limits
from moebatch.model.experts import expert_kernels
from moebatch.model.families.family import Expert
from moebatch.model.families.usual import mlp
from moebatch.model.grouped import GroupedExpert
from moebatch.model.operators import Operators
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import ExpertTokens
from moebatch.model.scratch import Scratch, chunks
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.stored_experts import StoredExperts
from moebatch.store.experts.dram import StayingTensors


class RoutedExperts:
    """Experts of all layers. Uses the scratch of the decoder."""

    def __init__(
        self,
        shape: ModelShape,
        stored: StoredExperts,
        formula: Expert,
        operators: Operators,
        scratch: Scratch,
        limits: Limits,
    ) -> None:
        """`stored` says how experts lie on disk, `formula` what one computes."""
        self._shape, self._stored, self._formula = shape, stored, formula
        self._operators, self._scratch = operators, scratch
        self._most_rows = limits.expert_rows
        self._kernels = expert_kernels(shape, operators.products) if formula is mlp else None
        choices = limits.pass_tokens, shape.experts_per_token
        self._ones_TK = (
            torch.ones(choices, device=operators.device) if shape.places_unweighed else None
        )
        """Weights of what experts make, where those of tokens are not for that."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return 0 if self._ones_TK is None else self._ones_TK.nbytes

    def run(self, layer: int, routing: Routing, experts: Mapping[int, Sequence[Tensor]]) -> None:
        together: list[GroupedExpert] = []
        for expert, parts in experts.items():
            try:
                matrices, taken = self._prepared(parts, layer, expert)
                tokens = routing.tokens[expert]
                if self._is_grouped(taken, tokens.num_tokens):
                    together.append(GroupedExpert(tokens, taken))
                else:
                    self._compute(layer, routing, tokens, matrices)
            except BadParts as error:
                raise CheckpointError(f"layer {layer}, expert {expert}: {error}") from None
        if together and self._kernels is not None:
            frame = self._scratch.frame()
            clamped = self._shape.expert_clamp(layer)
            if self._ones_TK is not None:
                routing = replace(routing, weights_TK=self._ones_TK[: len(routing.weights_TK)])
            self._kernels.run(frame, together, routing, most_rows=self._most_rows, clamped=clamped)

    def _prepared(
        self, parts: Sequence[Tensor], layer: int, expert: int
    ) -> tuple[Mapping[str, Matrix], Any]:
        """The matrices of an expert, and what the kernels take of them that compute experts
        together; once of an expert that stays."""
        if isinstance(parts, StayingTensors) and parts.prepared is not None:
            matrices, taken = parts.prepared
            return matrices, taken
        matrices, taken = self._stored.matrices(parts, layer, expert), None
        if self._kernels is not None:
            taken = self._kernels.taken(matrices, self._scratch.buffer.dtype)
        if isinstance(parts, StayingTensors):
            parts.prepared = matrices, taken
        return matrices, taken

    def _is_grouped(self, taken: Any, num_rows: int) -> bool:
        """Whether an expert of which this was taken is computed together with others."""
        if taken is None or self._kernels is None:
            return False
        return self._kernels.suits(taken, num_rows)

    def _compute(
        self, layer: int, routing: Routing, tokens: ExpertTokens, matrices: Mapping[str, Matrix]
    ) -> None:
        """One expert, step by step."""
        operators = self._operators.clamping(self._shape.expert_clamp(layer))
        for chunk in chunks(self._most_rows, slice(0, len(tokens.rows_M))):
            rows_M, choices_M = tokens.rows_M[chunk], tokens.choices_M[chunk]
            frame, num_rows = self._scratch.frame(), len(rows_M)
            x_ND = frame.take(operators.products.rows(num_rows), self._shape.expert_size)
            torch.index_select(routing.inputs_TI, 0, rows_M, out=x_ND[:num_rows])
            if self._shape.router.weighs_inputs:
                x_ND[:num_rows].mul_(routing.weights_TK[rows_M, choices_M][:, None])
            y_MD = self._formula(frame, x_ND, num_rows, matrices, operators)
            part = ExpertTokens(rows_M, choices_M)
            weights_TK = routing.weights_TK if self._ones_TK is None else self._ones_TK
            operators.elementwise.place(y_MD, part, routing.outputs_TKD, weights_TK)
