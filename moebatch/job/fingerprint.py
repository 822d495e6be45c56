"""A short name for everything that decides over numbers."""

from moebatch.engine.model_files import ModelFiles
from moebatch.store.fingerprint import checkpoint_fingerprint


def numerics_fingerprint(files: ModelFiles) -> str:
    """Stands for what decides over the numbers: configuration, tensors and dtype.

    Weights themselves are not read for it: names, shapes, places and file sizes must do.
    """
    digest = checkpoint_fingerprint(files.config, files.checkpoint)
    return f"moebatch-{str(files.dtype).removeprefix('torch.')}-{digest}"
