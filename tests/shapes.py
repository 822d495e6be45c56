"""Shapes of models, for tests and benchmarks."""

from pathlib import Path

from moebatch.spec.files.json_file import read_object
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape


def load_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder. Raises CheckpointError."""
    path = folder / "config.json"
    return read_shape(read_object(path), str(path))


def stored_bytes(shape: ModelShape) -> int:
    """Bytes of one expert in the checkpoint, as far as ``config.json`` says."""
    return shape.expert_bytes(shape.expert_format)
