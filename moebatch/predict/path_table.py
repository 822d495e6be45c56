"""How often paths through experts have led to each expert of the next layer: Klotski's table.

A path of length l at a layer is one expert out of each of the l MoE layers before it, all chosen by
the same token; a token that chooses K experts everywhere has K^l of them. Its code is a number in
base E, the oldest expert first.

Shape letters: L MoE layers, T tokens, E experts, K experts per token, P paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moebatch.errors import ConfigError
from moebatch.predict.predictor import Chosen
from moebatch.units import format_bytes

MAX_TABLE_BYTES = 128 * 2**20
"""A table is a hint: it must not take the room of the experts that it is to bring."""
_CHUNK_ROWS = 1024
_COUNT = np.uint32
Counts = NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True)
class PathTable:
    """Counts for all paths up to a length. A path that was never taken backs off to a shorter one,
    that of length 0 in the end: how often an expert was chosen at all."""

    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    counts: tuple[Counts, ...]
    """By the length of paths, from 0: [L, E^length, E]. One is added for every path of a token and
    every expert that the token chooses. Layers with fewer before them than the length stay 0."""
    num_tokens: int = 0
    """Tokens that were counted when the table was made."""

    @classmethod
    def empty(
        cls,
        moe_layers: Sequence[int],
        *,
        num_experts: int,
        experts_per_token: int,
        path_length: int = 1,
    ) -> "PathTable":
        """Nothing counted yet. Raises ConfigError if the table would be too large."""
        require_size(len(moe_layers), num_experts, path_length)
        sizes = [num_experts**length for length in range(path_length + 1)]
        return cls(
            moe_layers=tuple(moe_layers),
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            counts=tuple(np.zeros((len(moe_layers), n, num_experts), _COUNT) for n in sizes),
        )

    @property
    def path_length(self) -> int:
        """The longest paths that are counted."""
        return len(self.counts) - 1

    @property
    def num_bytes(self) -> int:
        """What the counts take."""
        return sum(counts.nbytes for counts in self.counts)

    def add(self, position: int, before: Sequence[Chosen], chosen_TK: Chosen) -> None:
        """Counts what tokens have chosen at the layer of that position.

        `before` is what the same tokens have chosen at the MoE layers before, oldest first; as many
        as the path length or fewer.
        """
        experts_TK = chosen_TK.astype(np.intp)
        for length in range(min(self.path_length, len(before)) + 1):
            paths_TP = path_codes(before[len(before) - length :], self.num_experts, len(experts_TK))
            places = paths_TP[:, :, None] * self.num_experts + experts_TK[:, None, :]
            np.add.at(self.counts[length][position].reshape(-1), places.reshape(-1), _COUNT(1))

    def add_pass(self, experts_LTK: Chosen) -> None:
        """Counts a whole pass."""
        for start in range(0, experts_LTK.shape[1], _CHUNK_ROWS):
            rows_LTK = experts_LTK[:, start : start + _CHUNK_ROWS]
            for position, chosen_TK in enumerate(rows_LTK):
                before = rows_LTK[max(0, position - self.path_length) : position]
                self.add(position, list(before), chosen_TK)

    def without_paths(self) -> "PathTable":
        """The same counts without those of paths; later counts go into both."""
        return replace(self, counts=self.counts[:1])


def path_codes(before: Sequence[Chosen], num_experts: int, num_rows: int) -> NDArray[np.intp]:
    """Codes of all paths of each token through the layers `before`, oldest first, [T, K^length]."""
    codes = np.zeros((num_rows, 1), np.intp)
    for experts_TK in before:
        codes = codes[:, :, None] * num_experts + experts_TK.astype(np.intp)[:, None, :]
        codes = codes.reshape(num_rows, -1)
    return codes


def require_size(num_layers: int, num_experts: int, path_length: int) -> None:
    """Raises ConfigError if paths of that length make too large a table."""
    paths = sum(num_experts**length for length in range(path_length + 1))
    num_bytes = num_layers * paths * num_experts * np.dtype(_COUNT).itemsize
    if num_bytes > MAX_TABLE_BYTES:
        message = (
            f"paths through {path_length} layers of {num_experts} experts make a table of "
            f"{format_bytes(num_bytes)}, at most {format_bytes(MAX_TABLE_BYTES)} are kept in "
            "memory; choose shorter ones"
        )
        raise ConfigError.at("--path-length", message)
