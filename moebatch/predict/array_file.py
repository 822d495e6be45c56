"""Arrays with a description in one safetensors file: written whole, refused when damaged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from moebatch.checkpoint.header import read_header
from moebatch.errors import CheckpointError
from moebatch.quoting import reason
from moebatch.spec.text_file import write_bytes

_KEY = "moebatch"


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], description: Mapping[str, Any]
) -> None:
    """Writes the arrays with a description that JSON can hold. Raises StorageError."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_bytes(path, save(contiguous, metadata={_KEY: json.dumps(description)}))


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Arrays and description. Raises CheckpointError where the file is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    read_header(path)  # names the rule that a damaged file breaks
    try:
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get(_KEY)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from None
    try:
        description = json.loads(text or "")
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict):
        raise CheckpointError(f"{path}: does not say what it holds")
    return arrays, description


def whole_numbers(value: object) -> bool:
    """Whether a part of a description is a list of numbers of layers or of sizes."""
    return isinstance(value, list) and all(is_whole(item) for item in value)


def is_whole(value: object) -> bool:
    """Whether a part of a description is a number of things."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
