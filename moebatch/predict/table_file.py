"""The correlation table of a model, kept beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.predict.array_file import is_whole
from moebatch.predict.owner import Arrays, Kind
from moebatch.predict.path_table import PathTable

TABLE = Kind(
    title="correlation table",
    file="correlation",
    version=1,
    remedy="moebatch calibrate {folder} --text FILE",
)


def empty_table(owner: ModelOwner, path_length: int) -> PathTable:
    """A table without counts. Raises ConfigError if it would be too large."""
    return PathTable.empty(
        owner.moe_layers,
        num_experts=owner.num_experts,
        experts_per_token=owner.experts_per_token,
        path_length=path_length,
    )


def save_table(path: Path, table: PathTable, owner: ModelOwner) -> None:
    """Writes the table, whole or not at all. Raises StorageError."""
    arrays = {f"paths.{length}": counts for length, counts in enumerate(table.counts)}
    length, tokens = table.path_length, table.num_tokens
    TABLE.save(path, owner, arrays, path_length=length, num_tokens=tokens)


def load_table(path: Path, owner: ModelOwner) -> PathTable:
    """The table at `path`, if it is one of that model.

    Raises CheckpointError where it is missing, damaged or of another model.
    """
    arrays, description = TABLE.load(path, owner)
    reason = _reason(arrays, description, owner)
    if reason:
        raise TABLE.refusal(path, owner, reason)
    return PathTable(
        moe_layers=owner.moe_layers,
        num_experts=owner.num_experts,
        experts_per_token=owner.experts_per_token,
        counts=tuple(arrays[f"paths.{n}"].astype(np.uint32) for n in range(len(arrays))),
        num_tokens=description["num_tokens"],
    )


def _reason(arrays: Arrays, found: Mapping[str, Any], owner: ModelOwner) -> str | None:
    """Why a file has no counts for that model."""
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
