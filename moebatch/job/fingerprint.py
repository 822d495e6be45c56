"""A short name for everything that decides over numbers."""

import hashlib
from dataclasses import asdict

from moebatch.engine.build import ModelFiles


def numerics_fingerprint(files: ModelFiles) -> str:
    """Stands for what decides over the numbers: configuration, tensors and dtype.

    Weights themselves are not read for it: names, shapes, places and file sizes must do.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr(sorted(files.config.items())).encode())
    for name, (path, entry) in sorted(files.checkpoint.tensors.items()):
        digest.update(f"{name}{path.name}{asdict(entry)}".encode())
    return f"moebatch-{str(files.dtype).removeprefix('torch.')}-{digest.hexdigest()}"
