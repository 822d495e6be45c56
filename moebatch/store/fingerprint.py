"""A short name for a checkpoint, without reading its weights."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moebatch.store.checkpoint import Checkpoint


def checkpoint_fingerprint(config: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Stands for a configuration and for names, shapes, dtypes and places of all tensors."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(sorted(config.items())).encode())
    for name, (path, entry) in sorted(checkpoint.tensors.items()):
        digest.update(f"{name}{path.name}{asdict(entry)}".encode())
    return digest.hexdigest()
