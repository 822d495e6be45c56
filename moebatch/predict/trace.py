"""What the gates of a run have chosen, pass by pass: kept in a file, played back.

Shape letters: L MoE layers, T tokens of a pass, K experts per token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebatch.errors import CheckpointError
from moebatch.predict.array_file import is_whole, read_arrays, whole_numbers, write_arrays
from moebatch.predict.predictor import Chosen
from moebatch.quoting import shown

_KIND = "routing trace"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePass:
    """One pass: what each of its tokens has chosen at each MoE layer."""

    moe_layers: tuple[int, ...]
    experts_LTK: NDArray[np.integer]

    @property
    def num_rows(self) -> int:
        """Tokens of the pass."""
        return int(self.experts_LTK.shape[1])

    def layer(self, layer: int) -> NDArray[np.integer]:
        """What was chosen at a MoE layer, [T, K]."""
        experts_TK: NDArray[np.integer] = self.experts_LTK[self.moe_layers.index(layer)]
        return experts_TK

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.integer]]]:
        """Each MoE layer in order with what was chosen there, [T, K]."""
        yield from zip(self.moe_layers, self.experts_LTK, strict=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingTrace:
    """Passes in their order."""

    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    passes: tuple[TracePass, ...]

    @classmethod
    def of(
        cls, passes: Sequence[Chosen], moe_layers: Sequence[int], *, num_experts: int
    ) -> "RoutingTrace":
        """Passes as arrays [L, T, K], at least one."""
        dtype = np.uint8 if num_experts <= 2**8 else np.uint16
        return cls(
            moe_layers=tuple(moe_layers),
            num_experts=num_experts,
            experts_per_token=passes[0].shape[-1],
            passes=tuple(
                TracePass(moe_layers=tuple(moe_layers), experts_LTK=experts.astype(dtype))
                for experts in passes
            ),
        )

    @classmethod
    def load(cls, path: Path) -> "RoutingTrace":
        """A trace that `save` has written. Raises CheckpointError where it is damaged."""
        arrays, description = read_arrays(path)
        reason = _reason(arrays, description)
        if reason:
            raise CheckpointError(f"{path}: {reason}; record one by `moebatch calibrate --trace`")
        ordered = [arrays[f"pass.{number}"] for number in range(len(arrays))]
        layers, num_experts = description["moe_layers"], description["num_experts"]
        return cls.of(ordered, layers, num_experts=num_experts)

    def save(self, path: Path, *, fingerprint: str = "") -> None:
        """Writes the trace of the model of that fingerprint. Raises StorageError."""
        description = {
            "kind": _KIND,
            "version": _VERSION,
            "model": fingerprint,
            "moe_layers": list(self.moe_layers),
            "num_experts": self.num_experts,
            "experts_per_token": self.experts_per_token,
        }
        arrays = {f"pass.{number}": one.experts_LTK for number, one in enumerate(self.passes)}
        write_arrays(path, arrays, description)

    @property
    def num_tokens(self) -> int:
        """Tokens of all passes."""
        return sum(one.num_rows for one in self.passes)

    def __iter__(self) -> Iterator[TracePass]:
        """The passes in order."""
        return iter(self.passes)


def _reason(arrays: dict[str, NDArray[np.integer]], found: dict[str, Any]) -> str | None:
    """Why a file is no trace."""
    if found.get("kind") != _KIND:
        return "is no routing trace"
    if found.get("version") != _VERSION:
        return f"is of version {shown(found.get('version'))}, this program reads {_VERSION}"
    layers, num_experts = found.get("moe_layers"), found.get("num_experts")
    num_choices = found.get("experts_per_token")
    if not (whole_numbers(layers) and is_whole(num_experts) and is_whole(num_choices)):
        return "its description is damaged"
    assert isinstance(layers, list) and isinstance(num_experts, int), "checked above"
    if not arrays or set(arrays) != {f"pass.{number}" for number in range(len(arrays))}:
        return "some of its passes are missing"
    for name, experts in arrays.items():
        if experts.dtype not in (np.uint8, np.uint16) or experts.ndim != 3:
            return f"{name} is no array of experts"
        if (experts.shape[0], experts.shape[2]) != (len(layers), num_choices):
            return f"{name} is not of {len(layers)} layers and {num_choices} experts per token"
        if not experts.size or int(experts.max()) >= num_experts:
            return f"{name} is empty or names an expert that is not there"
    return None
