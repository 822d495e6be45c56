"""The ``config.json`` of a model, as it is written."""

from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError
from moebatch.spec.json_file import read_json


def load_config(path: Path) -> dict[str, Any]:
    """The raw object in a ``config.json``. Raises CheckpointError if there is none."""
    try:
        config = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(config).__name__}")
    return config
