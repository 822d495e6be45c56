"""Short names for a checkpoint, without reading all of its weights."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moebatch.errors import CheckpointError
from moebatch.store.checkpoint import Checkpoint

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def checkpoint_fingerprint(config: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Stands for a configuration and for names, shapes, dtypes and places of all tensors."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(sorted(config.items())).encode())
    # Not the names of what the files of a folder are links to: those change when it is copied.
    files = {path: name for name, path in checkpoint.files.items()}
    for name, (path, entry) in sorted(checkpoint.tensors.items()):
        digest.update(f"{name}{files[path]}{asdict(entry)}".encode())
    return digest.hexdigest()


def weights_sample(checkpoint: Checkpoint) -> str:
    """Stands for the weights themselves, by a few bytes from all over every file: training, merging
    or converting a model changes them everywhere. Raises CheckpointError."""
    digest = hashlib.blake2b(digest_size=8)
    for name, path in sorted(checkpoint.files.items()):
        try:
            with path.open("rb") as file:
                last = max(0, path.stat().st_size - _SAMPLE_BYTES)
                for number in range(_SAMPLES):
                    file.seek(last * number // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        digest.update(name.encode())
    return digest.hexdigest()
