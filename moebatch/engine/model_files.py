"""A model folder: what it holds, checked, and how its weights are brought."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moebatch.errors import CheckpointError
from moebatch.layout.footprint import Dtypes
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.families import Family, family_of, required_tensors
from moebatch.model.layers import activation_of
from moebatch.predict.owner import ModelOwner
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.config_file import load_config
from moebatch.spec.hardware import Dtype
from moebatch.spec.shape import ModelShape
from moebatch.spec.shape_reader import read_shape, require_runnable
from moebatch.store.checkpoint import Checkpoint, file_inside
from moebatch.store.dense import DenseLoader
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.fingerprint import checkpoint_fingerprint
from moebatch.store.record import TORCH_DTYPES, Record

COMPUTE_DTYPES: Mapping[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model folder that has been validated against its config.json; no weight is loaded."""

    config: Mapping[str, Any]
    shape: ModelShape
    checkpoint: Checkpoint
    family: Family
    dtype: torch.dtype
    """In which everything is computed."""
    expert_dtype: torch.dtype
    """In which experts are stored."""

    @property
    def owner(self) -> ModelOwner:
        """The model, as files that are made for it name it."""
        fingerprint = checkpoint_fingerprint(self.config, self.checkpoint)
        return ModelOwner.of(self.checkpoint.folder, fingerprint, self.shape)

    @property
    def dtypes(self) -> Dtypes:
        """Bytes per element, for the planner."""
        compute = next(name for name, dtype in COMPUTE_DTYPES.items() if dtype == self.dtype)
        return Dtypes(stored_bits=8 * self.expert_dtype.itemsize, compute=compute)


def open_model(folder: Path, dtype: Dtype | Literal["auto"]) -> ModelFiles:
    """Reads configuration and headers of `folder`; `dtype` is a name or ``auto``.

    Raises CheckpointError when anything is missing, damaged, hostile or not supported.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder")
    path = file_inside(folder, "config.json")
    config = load_config(path)
    require_runnable(config, str(path))
    shape = read_shape(config, str(path))
    activation_of(shape.activation)
    checkpoint = Checkpoint.open(folder)
    required = required_tensors(shape, checkpoint.tensors)
    checkpoint.require(required)
    family = family_of(shape)
    expert_dtype = _expert_dtype(checkpoint, shape, family)
    return ModelFiles(
        config=config,
        shape=shape,
        checkpoint=checkpoint,
        family=family,
        dtype=expert_dtype if dtype == "auto" else COMPUTE_DTYPES[dtype],
        expert_dtype=expert_dtype,
    )


def _expert_dtype(checkpoint: Checkpoint, shape: ModelShape, family: Family) -> torch.dtype:
    names = {
        part.name
        for layer in shape.moe_layers
        for expert in range(shape.num_experts)
        for part in family.expert_parts(shape, layer, expert, checkpoint.tensors)
    }
    dtypes = checkpoint.dtypes(names)
    if len(dtypes) != 1:
        raise CheckpointError(
            f"{checkpoint.folder}: experts are stored in several dtypes "
            f"({', '.join(sorted(dtypes))}); they must share one"
        )
    return TORCH_DTYPES[dtypes.pop()]


def expert_records(files: ModelFiles) -> dict[ExpertKey, Record]:
    """Where each expert lies in the files."""
    shape, checkpoint = files.shape, files.checkpoint
    records = {}
    for layer in shape.moe_layers:
        for expert in range(shape.num_experts):
            parts = files.family.expert_parts(shape, layer, expert, checkpoint.tensors)
            extents = [checkpoint.extent(part.name, part.index) for part in parts]
            records[ExpertKey(layer, expert)] = Record.of(extents)
    return records


def load_dense(files: ModelFiles, memory: DeviceMemory | None = None) -> DenseWeights:
    """Weights outside experts, as they are computed with, in main memory or on a device."""
    names, checkpoint = files.checkpoint.tensors, files.checkpoint
    of_all = files.family.global_tensors(files.shape, names)
    of_layers = [
        files.family.layer_tensors(files.shape, layer, names)
        for layer in range(files.shape.num_layers)
    ]
    loader = DenseLoader(
        [checkpoint.extent(name) for roles in (of_all, *of_layers) for name in roles.values()],
        files.dtype,
        memory,
    )

    def load(roles: Mapping[str, str]) -> dict[str, Tensor]:
        return {role: loader.load(checkpoint.extent(name)) for role, name in roles.items()}

    weights = DenseWeights.of(load(of_all), [load(roles) for roles in of_layers])
    loader.close()
    return weights


def load_gates(files: ModelFiles) -> list[Tensor]:
    """The gates of all layers with experts, [E, D] each, without anything else."""
    names, checkpoint = files.checkpoint.tensors, files.checkpoint
    of_layers = (
        files.family.layer_tensors(files.shape, layer, names) for layer in files.shape.moe_layers
    )
    extents = [checkpoint.extent(roles["router"]) for roles in of_layers]
    loader = DenseLoader(extents, files.dtype)
    gates = [loader.load(extent) for extent in extents]
    loader.close()
    return gates


def load_embedded(files: ModelFiles, tokens: Iterable[int]) -> Tensor:
    """What the model makes of each of these tokens, N, before its first layer, [N, D] in float16,
    without the rest of the vocabulary."""
    checkpoint = files.checkpoint
    name = files.family.global_tensors(files.shape, checkpoint.tensors)["embedding"]
    extents = [checkpoint.extent(name, token) for token in tokens]
    loader = DenseLoader(extents, torch.float16)
    rows = torch.stack([loader.load(extent) for extent in extents])
    loader.close()
    return rows
