"""The ``config.json`` of a model, as it is written."""

import json
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError


def load_config(path: Path) -> dict[str, Any]:
    """The raw object in a ``config.json``. Raises CheckpointError if there is none."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(config).__name__}")
    return config
