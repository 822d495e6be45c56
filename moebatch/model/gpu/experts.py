"""Experts of few rows together, in three launches: a table of where they lie goes up, then come
their gated products, and the last one.

Shape letters: T tokens of the pass, K experts per token, D hidden, F expert width, M tokens of one
expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.formats.weight_format import Matrix
from moebatch.layout.fused import portions
from moebatch.model.gpu.rows import launch
from moebatch.model.routing.router import ExpertTokens, Routing
from moebatch.model.scratch import Frame

_ROLES = ("gate", "up", "down")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILES = (16, 32, 64)
"""Rows of a tile: the least that tensor cores take, and more where experts have more."""
_OUTPUTS = 64
_INPUT_BYTES = 128
"""Of a row that is loaded at a time."""
_ALIGNMENT = 16
"""Bytes to which addresses have to be aligned."""


class GroupedExpert(NamedTuple):
    """One of a group."""

    tokens: ExpertTokens
    matrices: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Portion:
    """Experts whose inner rows fit the room together."""

    first_tile: int
    num_tiles: int
    num_rows: int


class GroupedExperts:
    """SwiGLU experts without clamping whose matrices lie anywhere in the memory of the device."""

    @staticmethod
    def taken(matrices: Mapping[str, Matrix], dtype: torch.dtype) -> Mapping[str, Tensor] | None:
        """The same matrices, if an expert that has them can be one of a group computed in
        `dtype`."""
        plain = {
            role: matrix
            for role, matrix in matrices.items()
            if isinstance(matrix, Tensor)
            and matrix.dtype == dtype in _DTYPES
            and matrix.is_contiguous()
            and matrix.data_ptr() % _ALIGNMENT == 0
            and matrix.shape[1] * matrix.itemsize % _ALIGNMENT == 0
        }
        return plain if plain.keys() == matrices.keys() == {*_ROLES} else None

    def run(
        self,
        frame: Frame,
        experts: Sequence[GroupedExpert],
        routing: Routing,
        *,
        most_rows: int,
    ) -> None:
        """Fills the ``outputs_TKD`` of the experts, with room for the inner numbers of `most_rows`
        rows at a time. All experts are of one shape, and suit."""
        counts = [len(each.tokens.rows_M) for each in experts]
        height = next((rows for rows in _TILES if rows >= max(counts)), _TILES[-1])
        table: list[tuple[int, ...]] = []
        found: list[_Portion] = []
        for chosen in portions(counts, most_rows):
            first, num_rows = len(table), 0
            for number in chosen:
                table += _tiles(experts[number], height, num_rows)
                num_rows += counts[number]
            found.append(_Portion(first, len(table) - first, num_rows))
        room_MF = frame.take(max(portion.num_rows for portion in found), _width(experts))
        table_NX = _on_device(table, room_MF.device)
        for portion in found:
            self._run(table_NX, portion, room_MF, routing, height)

    def _run(
        self,
        table_NX: Tensor,
        portion: _Portion,
        room_MF: Tensor,
        routing: Routing,
        height: int,
    ) -> None:
        normed_TD, outputs_TKD = routing.normed_TD, routing.outputs_TKD
        (_, num_choices, D), F = outputs_TKD.shape, room_MF.shape[1]
        tiles = table_NX[portion.first_tile : portion.first_tile + portion.num_tiles]
        options = {
            # Numbers of 32 bits are multiplied as such, and not as 19 of them.
            "precision": "ieee",
            "M": height,
            "N": _OUTPUTS,
            "I": _INPUT_BYTES // room_MF.itemsize,
        }
        launch(
            "experts_in",
            (portion.num_tiles, ceil(F / _OUTPUTS)),
            room_MF,
            normed_TD,
            tiles,
            normed_TD.stride(0),
            D,
            F,
            **options,
        )
        launch(
            "experts_out",
            (portion.num_tiles, ceil(D / _OUTPUTS)),
            outputs_TKD,
            room_MF,
            routing.weights_TK,
            tiles,
            num_choices,
            D,
            F,
            **options,
        )


def _tiles(expert: GroupedExpert, height: int, start: int) -> Iterator[tuple[int, ...]]:
    """Rows of the table for one expert, whose inner rows begin at `start`."""
    matrices = [expert.matrices[role].data_ptr() for role in _ROLES]
    rows_M, choices_M = expert.tokens
    assert rows_M.is_contiguous() and choices_M.is_contiguous(), "slices of what was sorted"
    for first in range(0, len(rows_M), height):
        places = [each.data_ptr() + first * each.itemsize for each in expert.tokens]
        yield *matrices, *places, min(height, len(rows_M) - first), start + first


def _width(experts: Sequence[GroupedExpert]) -> int:
    return experts[0].matrices["gate"].shape[0]


def _on_device(table: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Without waiting for the device: torch keeps pinned memory until the copy is done."""
    table_NX = torch.tensor(table, pin_memory=device.type == "cuda")
    return table_NX.to(device, non_blocking=True)
