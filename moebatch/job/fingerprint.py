"""A short name for everything that decides over numbers."""

from moebatch.engine.model_files import ModelFiles
from moebatch.engine.pregate_file import pregates_fingerprint
from moebatch.store.fingerprint import checkpoint_fingerprint


def numerics_fingerprint(files: ModelFiles) -> str:
    """Stands for what decides over the numbers: configuration, tensors, dtype, and gates
    that are not the checkpoint's.

    Weights themselves are not read for it: names, shapes, places and file sizes must do.
    """
    digest = checkpoint_fingerprint(files.config, files.checkpoint)
    name = f"moebatch-{str(files.dtype).removeprefix('torch.')}-{digest}"
    if files.pregates is None:
        return name
    return f"{name}-pregates{files.activation_level}-{pregates_fingerprint(files.pregates)}"
