"""Experts of few rows together, in three launches: a table of where they lie goes up, then come
their gated products, and the last one.

Shape letters: T tokens of the pass, K experts per token, D hidden, F expert width, M tokens of one
expert.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebatch.arrays import Ints
from moebatch.layout.fused import Middle, is_grouped, portions
from moebatch.model.gpu.coding import (
    Coding,
    GroupedMatrices,
    Stored,
    grouped_matrices,
    inputs_at_once,
)
from moebatch.model.gpu.rows import clamping, launch
from moebatch.model.grouped import GroupedExpert
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import ExpertTokens
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate

_TILES = (16, 32, 64)
"""Rows of a tile: the least that tensor cores take, and more where experts have more."""
_OUTPUTS = 64
_POWERS: Mapping[Middle, int] = {"relu": 1, "relu2": 2}
"""Of what is above zero, where there is no gate."""


@dataclass(frozen=True, slots=True)
class _Portion:
    """Experts whose inner rows fit the room together."""

    first_tile: int
    num_tiles: int
    num_rows: int


class GroupedExperts:
    """Experts whose matrices lie anywhere in the memory of the device."""

    def __init__(self, middle: Middle = "gated") -> None:
        """`middle` says what comes between products of an expert."""
        self._power = _POWERS.get(middle, 0)

    @staticmethod
    def taken(matrices: Mapping[str, Stored], dtype: torch.dtype) -> GroupedMatrices | None:
        """The same matrices, if an expert that has them can be one of a group computed in
        `dtype`."""
        return grouped_matrices(matrices, dtype)

    @staticmethod
    def suits(taken: GroupedMatrices, num_rows: int) -> bool:
        return is_grouped(num_rows)

    def run(
        self,
        frame: Frame,
        experts: Sequence[GroupedExpert],
        routing: Routing,
        *,
        most_rows: int,
        clamped: ClampedGate | None = None,
    ) -> None:
        """As `ExpertKernels.run`, of experts whose matrices lie in the same way in three launches.
        All experts are of one shape."""
        alike: dict[tuple[Coding, Coding], list[GroupedExpert]] = defaultdict(list)
        for expert in experts:
            alike[expert.matrices.coding_in, expert.matrices.coding_out].append(expert)
        for group in alike.values():
            self._run_alike(frame.branch(), group, routing, most_rows, clamping(clamped))

    def _run_alike(
        self,
        frame: Frame,
        experts: Sequence[GroupedExpert],
        routing: Routing,
        most_rows: int,
        gating: Mapping[str, Any],
    ) -> None:
        counts = [each.tokens.num_tokens for each in experts]
        height = next((rows for rows in _TILES if rows >= max(counts)), _TILES[-1])
        tiles_of: list[int] = []
        places: list[tuple[int, ...]] = []
        found: list[_Portion] = []
        for chosen in portions(counts, most_rows):
            first, num_rows = len(places), 0
            for number in chosen:
                of_expert = [*_tiles(experts[number].tokens, counts[number], height, num_rows)]
                places += of_expert
                tiles_of += [number] * len(of_expert)
                num_rows += counts[number]
            found.append(_Portion(first, len(places) - first, num_rows))
        matrices = experts[0].matrices
        room_MF = frame.take(max(portion.num_rows for portion in found), matrices.width)
        addresses_EX = np.stack([each.matrices.addresses for each in experts])
        table_NX = np.concatenate((addresses_EX[tiles_of], np.array(places, np.int64)), axis=1)
        tiles_NX = _on_device(table_NX, room_MF.device)
        for portion in found:
            tiles = tiles_NX[portion.first_tile : portion.first_tile + portion.num_tiles]
            self._run(tiles, matrices, room_MF, routing, height, gating)

    def _run(
        self,
        tiles: Tensor,
        matrices: GroupedMatrices,
        room_MF: Tensor,
        routing: Routing,
        height: int,
        gating: Mapping[str, Any],
    ) -> None:
        inputs_TD, outputs_TKD = routing.inputs_TI, routing.outputs_TKD
        (_, num_choices, D), F = outputs_TKD.shape, room_MF.shape[1]
        options: dict[str, Any] = {
            # Numbers of 32 bits are multiplied as such, and not as 19 of them.
            "precision": "ieee",
            "M": height,
            "N": _OUTPUTS,
            "I": inputs_at_once(room_MF.dtype),
        }
        launch(
            "experts_in",
            (len(tiles), ceil(F / _OUTPUTS)),
            room_MF,
            inputs_TD,
            tiles,
            inputs_TD.stride(0),
            D,
            F,
            coding=matrices.coding_in,
            power=self._power,
            **gating,
            **options,
        )
        launch(
            "experts_out",
            (len(tiles), ceil(D / _OUTPUTS)),
            outputs_TKD,
            room_MF,
            routing.weights_TK,
            tiles,
            num_choices,
            D,
            F,
            coding=matrices.coding_out,
            **options,
        )


def _tiles(tokens: ExpertTokens, count: int, height: int, start: int) -> Iterator[tuple[int, ...]]:
    """The end of the table's rows for one expert, whose inner rows begin at `start`."""
    assert all(each.is_contiguous() for each in tokens), "slices of what was sorted"
    rows, choices = (each.data_ptr() for each in tokens)
    item = tokens.rows_M.itemsize
    for first in range(0, count, height):
        at = first * item
        yield rows + at, choices + at, min(height, count - first), start + first


def _on_device(table: Ints, device: torch.device) -> Tensor:
    """Without waiting for the device: torch keeps pinned memory until the copy is done."""
    table_NX = torch.from_numpy(table)
    if device.type != "cuda":
        return table_NX
    return table_NX.pin_memory().to(device, non_blocking=True)
