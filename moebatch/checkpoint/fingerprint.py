"""Short names for a checkpoint, without reading all of its weights; and for single files."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import digits
from typing import Any

from moebatch.checkpoint.index import Checkpoint
from moebatch.spec.files.json_file import readable

_SAMPLES = 16
"""Of each file."""
_SAMPLES_ALIKE = 8
"""Tensors of each kind."""
_SAMPLE_BYTES = 4096
_NO_DIGITS = str.maketrans("", "", digits)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOwner:
    """A model, as the files that were made for it name it."""

    folder: Path
    fingerprint: str
    """`checkpoint_fingerprint` and `weights_sample` of it: what was learnt of one model is of no
    use to another that was trained on from it, however alike their files are."""
    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int

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
    for name in sorted(checkpoint.tensors):
        found = checkpoint.tensors[name]
        said = {key: getattr(found, key) for key in ("dtype", "shape", "offset", "num_bytes")}
        digest.update(f"{name}{files[found.path]}{said}".encode())
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
    """Stands for the weights themselves, by a few bytes from all over every file, since merging or
    converting a model changes them everywhere, and from some tensors of each kind, since training
    may change routers alone, or what attends. Raises CheckpointError."""
    digest, middles = hashlib.blake2b(digest_size=8), _middles(checkpoint)
    for name, path in sorted(checkpoint.files.items()):
        with readable(path), path.open("rb") as file:
            last = max(0, path.stat().st_size - _SAMPLE_BYTES)
            everywhere = (last * number // (_SAMPLES - 1) for number in range(_SAMPLES))
            for start in sorted({*everywhere, *middles.get(path, ())}):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
        digest.update(name.encode())
    return digest.hexdigest()


def _middles(checkpoint: Checkpoint) -> dict[Path, list[int]]:
    """Places in files: the middles of some tensors of each kind, from all over the model. Tensors
    are of one kind whose names differ in nothing but numbers."""
    kinds: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        kinds.setdefault(name.translate(_NO_DIGITS), []).append(name)
    places: dict[Path, list[int]] = {}
    for alike in kinds.values():
        alike.sort(key=lambda name: (len(name), name))  # the ninth layer before the tenth
        last = len(alike) - 1
        for name in {alike[last * n // (_SAMPLES_ALIKE - 1)] for n in range(_SAMPLES_ALIKE)}:
            found = checkpoint.tensors[name]
            middle = found.offset + max(0, found.num_bytes - _SAMPLE_BYTES) // 2
            places.setdefault(found.path, []).append(middle)
    return places
