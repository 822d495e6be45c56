"""A short name for everything that decides over numbers."""

from moebatch.checkpoint.fingerprint import checkpoint_fingerprint
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import EXACT, Approximation


def numerics_fingerprint(files: ModelFiles, approximation: Approximation = EXACT) -> str:
    """Stands for what decides over the numbers: configuration, tensors, dtype, and what is left out
    of the arithmetic.

    Weights themselves are not read for it: names, shapes, places and file sizes must do.
    """
    digest = checkpoint_fingerprint(files.config, files.checkpoint)
    parts = ("moebatch", str(files.dtype).removeprefix("torch."), digest, approximation.fingerprint)
    return "-".join(part for part in parts if part)
