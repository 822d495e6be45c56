"""Experts of a small checkpoint, and what they should be."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moebatch.checkpoint.index import Checkpoint
from moebatch.checkpoint.record import Record
from moebatch.schedule.slots.expert_load import ExpertKey

NUM_LAYERS, NUM_EXPERTS = 4, 3
KEYS = tuple(ExpertKey(layer, e) for layer in range(NUM_LAYERS) for e in range(NUM_EXPERTS))
SHAPES = ((70, 33), (71, 33), (33, 65))
CHUNK_BYTES = 4096


def weight(key: ExpertKey, part: int) -> Tensor:
    """What the file says."""
    generator = torch.Generator().manual_seed(100 * key.layer + 10 * key.expert + part)
    return torch.randn(SHAPES[part], generator=generator)


def write_experts(folder: Path, keys: Iterable[ExpertKey] = KEYS) -> dict[ExpertKey, Record]:
    """Writes a checkpoint of experts of three matrices, matrices of a kind side by side."""
    keys, parts = list(keys), range(len(SHAPES))
    names = {(key, part): f"{part}.{key.layer}.{key.expert}" for key in keys for part in parts}
    save_file(
        {name: weight(key, part) for (key, part), name in names.items()},
        folder / "model.safetensors",
    )
    checkpoint = Checkpoint.open(folder)
    return {key: Record.of([checkpoint.extent(names[key, part]) for part in parts]) for key in keys}


def assert_is(key: ExpertKey, tensors: Sequence[Tensor]) -> None:
    """Asserts that these are the expert's, byte by byte."""
    assert len(tensors) == len(SHAPES)
    for part, tensor in enumerate(tensors):
        assert tensor.cpu().equal(weight(key, part)), f"matrix {part} of {key} differs"
