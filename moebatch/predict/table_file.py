"""The correlation table of a model, kept beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from moebatch.errors import CheckpointError
from moebatch.predict.array_file import is_whole, read_arrays, write_arrays
from moebatch.predict.path_table import PathTable
from moebatch.spec.shape import ModelShape

_KIND = "correlation table"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOwner:
    """The model that a table belongs to."""

    folder: Path
    fingerprint: str
    """`moebatch.store.fingerprint.checkpoint_fingerprint` of it."""
    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(cls, folder: Path, fingerprint: str, shape: ModelShape) -> "TableOwner":
        """The model of that shape."""
        return cls(
            folder=folder,
            fingerprint=fingerprint,
            moe_layers=tuple(shape.moe_layers),
            num_experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
        )

    def empty_table(self, path_length: int) -> PathTable:
        """A table without counts. Raises ConfigError if it would be too large."""
        return PathTable.empty(
            self.moe_layers,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            path_length=path_length,
        )

    @property
    def description(self) -> dict[str, Any]:
        """What a file says about the model that it belongs to."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "model": self.fingerprint,
            "moe_layers": list(self.moe_layers),
            "num_experts": self.num_experts,
            "experts_per_token": self.experts_per_token,
        }


def table_path(folder: Path) -> Path:
    """Where the table of a model is kept."""
    return folder / "moebatch" / "correlation.safetensors"


def save_table(path: Path, table: PathTable, owner: TableOwner) -> None:
    """Writes the table, whole or not at all. Raises StorageError."""
    description = {
        **owner.description,
        "path_length": table.path_length,
        "num_tokens": table.num_tokens,
        "date": date.today().isoformat(),
    }
    arrays = {f"paths.{length}": counts for length, counts in enumerate(table.counts)}
    write_arrays(path, arrays, description)


def load_table(path: Path, owner: TableOwner) -> PathTable:
    """The table at `path`, if it is one of that model.

    Raises CheckpointError where it is missing, damaged or of another model.
    """
    try:
        arrays, description = read_arrays(path)
        reason = _reason(arrays, description, owner)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_advice(owner)}") from None
    if reason:
        raise CheckpointError(f"{path}: {reason}; {_advice(owner)}")
    return PathTable(
        moe_layers=owner.moe_layers,
        num_experts=owner.num_experts,
        experts_per_token=owner.experts_per_token,
        counts=tuple(arrays[f"paths.{n}"].astype(np.uint32) for n in range(len(arrays))),
        num_tokens=description["num_tokens"],
    )


def _reason(arrays: Mapping[str, Any], found: Mapping[str, Any], owner: TableOwner) -> str | None:
    """Why a file is no table of that model."""
    if found.get("kind") != _KIND:
        return "is no correlation table"
    if found.get("version") != _VERSION:
        return f"is of version {found.get('version')!r}, this program reads {_VERSION}"
    if any(found.get(name) != value for name, value in owner.description.items()):
        return "was made for another model, or for another state of this one"
    length = len(arrays) - 1
    if found.get("path_length") != length or not is_whole(found.get("num_tokens")):
        return "its description is damaged"
    num_layers, num_experts = len(owner.moe_layers), owner.num_experts
    expected = {f"paths.{n}": (num_layers, num_experts**n, num_experts) for n in range(length + 1)}
    if {name: array.shape for name, array in arrays.items()} != expected:
        return f"its counts are not those of paths through {length} layers"
    if any(array.dtype != np.uint32 for array in arrays.values()):
        return "its counts are of another type"
    return None


def _advice(owner: TableOwner) -> str:
    return f"run `moebatch calibrate {owner.folder} --text FILE` again"
