"""Short names for a checkpoint, without reading all of its weights; and for single files."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moebatch.checkpoint.index import Checkpoint
from moebatch.errors import CheckpointError
from moebatch.spec.model.shape import ModelShape

_SAMPLES = 16
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOwner:
    """A model, as the files that were made for it name it."""

    folder: Path
    fingerprint: str
    """`checkpoint_fingerprint` of it."""
    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(cls, folder: Path, fingerprint: str, shape: ModelShape) -> "ModelOwner":
        """The model of that shape."""
        return cls(
            folder=folder,
            fingerprint=fingerprint,
            moe_layers=tuple(shape.moe_layers),
            num_experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
        )

    @property
    def description(self) -> dict[str, Any]:
        """What a file says about the model that it belongs to."""
        return {
            "model": self.fingerprint,
            "moe_layers": list(self.moe_layers),
            "num_experts": self.num_experts,
            "experts_per_token": self.experts_per_token,
        }


def checkpoint_fingerprint(config: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Stands for a configuration and for names, shapes, dtypes and places of all tensors."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(sorted(config.items())).encode())
    # Not the names of what the files of a folder are links to: those change when it is copied.
    files = {path: name for name, path in checkpoint.files.items()}
    for name, (path, entry) in sorted(checkpoint.tensors.items()):
        digest.update(f"{name}{files[path]}{asdict(entry)}".encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Of all that a file holds; the name of a folder, and nothing of what cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except IsADirectoryError:
        return str(path)
    except OSError:
        return ""


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
