"""A model folder: what it holds, checked; no weight is loaded."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from moebatch.checkpoint.fingerprint import ModelOwner, checkpoint_fingerprint, weights_sample
from moebatch.checkpoint.gguf.model import find_gguf, open_gguf
from moebatch.checkpoint.header import Extent
from moebatch.checkpoint.index import Checkpoint, Weight, file_inside, require_model_folder
from moebatch.checkpoint.record import TORCH_DTYPES, Record, runs_of
from moebatch.errors import CheckpointError
from moebatch.formats.plain import BFLOAT16, TABLES, PlainFormat
from moebatch.formats.registry import FORMATS
from moebatch.formats.weight_format import StoredPart, WeightFormat
from moebatch.layout.footprint import Dtypes
from moebatch.layout.placed import expert_keys
from moebatch.quoting import shown
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.files.gguf_file import is_gguf_file
from moebatch.spec.files.json_file import read_object
from moebatch.spec.machine.hardware import Dtype
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_runnable_shape
from moebatch.spec.model.stored_experts import StoredExperts
from moebatch.spec.model.tensor_names import Named, TensorNames
from moebatch.units import named_layers

COMPUTE_DTYPES: Mapping[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)  # no slots: weights are sampled once
class ModelFiles:
    """A model folder that has been validated against its config.json."""

    config: Mapping[str, Any]
    shape: ModelShape
    checkpoint: Checkpoint
    experts: StoredExperts
    dtype: torch.dtype
    """In which everything is computed."""

    @property
    def described_in(self) -> Path:
        """Where its configuration is read."""
        checkpoint = self.checkpoint
        name = next(iter(checkpoint.files)) if checkpoint.is_gguf else "config.json"
        return checkpoint.folder / name

    @cached_property
    def sample(self) -> str:
        """`weights_sample` of the checkpoint, read once. Raises CheckpointError."""
        return weights_sample(self.checkpoint)

    @cached_property
    def owner(self) -> ModelOwner:
        """The model, as files that are made for it name it. Raises CheckpointError."""
        described = checkpoint_fingerprint(self.config, self.checkpoint)
        return ModelOwner(
            folder=self.checkpoint.folder,
            fingerprint=f"{described}-{self.sample}",
            moe_layers=tuple(self.shape.moe_layers),
            num_experts=self.shape.num_experts,
            experts_per_token=self.shape.experts_per_token,
        )

    @property
    def dtypes(self) -> Dtypes:
        """How experts lie in the files and what they are computed in, for the planner."""
        compute = next(name for name, dtype in COMPUTE_DTYPES.items() if dtype == self.dtype)
        experts = self.experts
        count = len(self.shape.moe_layers) * self.shape.num_experts
        of_others = experts.spared_bytes
        spared = (*of_others, *[0] * (count - len(of_others)))
        mean = 1 - sum(spared) / count / self.shape.expert_bytes(experts.format)
        declared = self.shape.expert_bias_params * self.shape.dtype_bytes
        return Dtypes(
            stored=experts.taken_as,
            compute=compute,
            mean_share=mean,
            spared_bytes=min(spared),
            extra_bias_bytes=max(0, experts.bias_bytes - declared),
            num_runs=len(runs_of([Record.of(self._expert_extents(self.shape.moe_layers[0], 0))])),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What ``config.json`` says of experts and their tensors do not."""
        said, found = self.shape.expert_format, self.experts.format
        is_plain = said.is_tiled and found.is_tiled
        others = chain.from_iterable(self.experts.others.values())
        if self.checkpoint.is_gguf or is_plain or str(said) in map(str, (found, *others)):
            return ()
        return (
            f"{self.checkpoint.folder}: config.json says that experts are stored as {said}; by "
            f"their tensors, which are believed, they are {found}",
        )

    def global_weights(self) -> dict[str, Weight]:
        """What no layer owns, by role."""
        return self._weights(
            _names_of(self.shape).global_weights(self.shape, self.checkpoint.tensors)
        )

    def layer_weights(self, layer: int) -> dict[str, Weight]:
        """Everything in a layer but its experts, by role."""
        names = self.checkpoint.tensors
        return self._weights(_names_of(self.shape).layer_weights(self.shape, layer, names))

    def weights_beside_experts(self) -> Iterator[tuple[int | None, str, Weight]]:
        """Each with its layer, None where no layer owns it, and its role."""
        yield from ((None, *of_role) for of_role in self.global_weights().items())
        for layer in range(self.shape.num_layers):
            yield from ((layer, *of_role) for of_role in self.layer_weights(layer).items())

    def expert_weights(self, layer: int, expert: int) -> Iterator[Weight]:
        """The weights in which an expert lies, its biases last, without others beside it."""
        extents = iter(self._expert_extents(layer, expert))
        for name, stored, size in self.experts.weights_of(layer, expert):
            num_parts = len(stored.parts(name, size))
            yield Weight(name, stored, size, tuple(islice(extents, num_parts)))

    def expert_records(self) -> dict[ExpertKey, Record]:
        stored, records = self.experts.format, {}
        plain = TORCH_DTYPES[stored.dtype] if isinstance(stored, PlainFormat) else None
        num_biases = len(self.experts.biases)
        for key in expert_keys(self.shape):
            extents = self._expert_extents(*key)
            dtypes = [plain] * (len(extents) - num_biases) + [None] * num_biases
            records[key] = Record.of(extents, dtypes)
        return records

    def _expert_extents(self, layer: int, expert: int) -> list[Extent]:
        """Where an expert lies, as `StoredExperts.pieces` names what is read of it."""
        return [
            self.checkpoint.extent(piece.name, piece.index, piece.num_slices)
            for piece in self.experts.pieces(layer, expert)
        ]

    @property
    def expert_bytes(self) -> int:
        """Of all experts in the files."""
        extents = (each for key in expert_keys(self.shape) for each in self._expert_extents(*key))
        return sum(each.num_bytes for each in extents)

    @property
    def read_as_computed(self) -> "ModelFiles":
        """The same where plain numbers of experts become those of the compute dtype when they are
        read, if they take as many bytes: a GPU would convert them for every micro-batch."""
        stored, computed = self.experts.format, FORMATS[self.dtypes.compute]
        size = self.shape.expert_bytes
        if not isinstance(stored, PlainFormat) or size(stored) != size(computed):
            return self
        offsets = (p.buffer_offset for r in self.expert_records().values() for p in r.places)
        if any(offset % self.dtype.itemsize for offset in offsets):
            return self  # numbers may lie in two pieces
        return replace(self, experts=replace(self.experts, format=computed))

    def required_tensors(self) -> Iterator[StoredPart]:
        """Every tensor that the checkpoint must hold, experts included.

        The embedding and the head have exactly ``vocab_size`` rows; where a vocabulary is padded,
        ``vocab_size`` counts the padding and the tokenizer knows fewer tokens.
        """
        names, shape, found = _names_of(self.shape), self.shape, self.checkpoint.tensors
        weights = list(names.global_weights(shape, found).items())
        for layer in range(shape.num_layers):
            weights += names.layer_weights(shape, layer, found).items()
        for role, (name, size) in weights:
            stored = self.checkpoint.find_format(name, size, self._likely(role, name, size))
            yield from (stored or BFLOAT16).parts(name, size)
        for layer in shape.moe_layers:
            for expert in range(1 if self.experts.is_stacked else shape.num_experts):
                yield from self.experts.parts(layer, expert)

    def _likely(self, role: str, name: str, size: tuple[int, ...]) -> WeightFormat:
        """The format in which a weight may lie, should its tensors leave that open: that of
        experts, or of tables whole numbers."""
        if role != "router_table":
            return self.shape.expert_format
        look = self.checkpoint.look
        return next((one for one in TABLES if one.fits(name, size, look)), TABLES[0])

    def _weights(self, named: Named) -> dict[str, Weight]:
        checkpoint, names = self.checkpoint, _names_of(self.shape)
        found = {
            role: checkpoint.weight(*weight, self._likely(role, *weight))
            for role, weight in named.items()
        }
        for role in found.keys() & names.first_rows.keys():
            found[role] = found[role].rows(range(1))
        for role in found.keys() & {*names.ones, *names.first_rows}:
            found[role] = replace(found[role], shape=(prod(found[role].shape),))
        for role in found.keys() & {*names.turned} if not checkpoint.is_gguf else ():
            found[role] = replace(found[role], is_turned=True)
        return found


def open_model(folder: Path, dtype: Dtype | Literal["auto"]) -> ModelFiles:
    """Reads configuration and headers of `folder`; `dtype` is a name or ``auto``.

    Raises CheckpointError when anything is missing, damaged, hostile or not supported.
    """
    config, shape, checkpoint = _opened(folder)
    names = _names_of(shape)
    shape = names.found(shape, checkpoint.tensors)
    layouts = names.expert_layouts(checkpoint.tensors)
    if not layouts:
        raise CheckpointError(
            f"{folder}: {shape.architecture} can be planned only; it is not known what tensors of "
            "its experts are called"
        )
    experts = StoredExperts.found(shape, layouts, checkpoint.find_format, checkpoint.look)
    experts = experts.with_formats(_expert_formats(shape, checkpoint, experts))
    files = ModelFiles(
        config=config,
        shape=shape,
        checkpoint=checkpoint,
        experts=experts,
        dtype=COMPUTE_DTYPES[experts.compute_dtype(shape) if dtype == "auto" else dtype],
    )
    checkpoint.require(files.required_tensors())
    if checkpoint.is_gguf:
        _require_biases_read(files)
    return files


def _opened(path: Path) -> tuple[Mapping[str, Any], ModelShape, Checkpoint]:
    if not is_gguf_file(path):
        require_model_folder(path)
    names = find_gguf(path)
    if names:
        return open_gguf(path.parent if is_gguf_file(path) else path, names)
    file = file_inside(path, "config.json")
    config = read_object(file)
    return config, read_runnable_shape(config, str(file)), Checkpoint.open(path)


def _require_biases_read(files: ModelFiles) -> None:
    """Raises CheckpointError for a bias in GGUF that is not read: no metadata say of biases that
    they are there, and llama.cpp adds those that it finds. Layers behind the last one may have
    any."""
    shape, checkpoint = files.shape, files.checkpoint
    read = {part.name for part in files.required_tensors()}
    layers = tuple(f"blk.{layer}." for layer in range(shape.num_layers))
    biases = (name for name in checkpoint.tensors if name.endswith(".bias"))
    others = [name for name in biases if name.startswith(layers) and name not in read]
    if others:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {shown(min(others))} is a bias that is not read from "
            f"GGUF of {shape.architecture}; use the model's safetensors files"
        )


def _expert_formats(
    shape: ModelShape, checkpoint: Checkpoint, experts: StoredExperts
) -> dict[tuple[int, int], tuple[WeightFormat, ...]]:
    """The formats of the weights of each expert, by layer and number.

    Raises CheckpointError for several formats that are not read in the same way, and for codes
    across rows."""
    formats: dict[tuple[int, int], tuple[WeightFormat, ...]] = {}
    likely = experts.format
    known, there = {likely.name: likely}, set[str]()
    for layer, expert in expert_keys(shape):
        if experts.is_stacked and expert:
            formats[layer, expert] = formats[layer, 0]
            continue
        of_expert = []
        for name, size in experts.named_weights(layer, expert):
            stored = checkpoint.find_format(name, size, likely)
            if stored is not None:
                there.add(stored.name)
                likely = known.setdefault(stored.name, stored)
            of_expert.append(likely)
        formats[layer, expert] = tuple(of_expert)
    if len(there) > 1 and any(known[name].is_tiled for name in there):
        named = "; ".join(sorted(str(known[name]) for name in there))
        raise CheckpointError(
            f"{checkpoint.folder}: experts are stored in several formats ({named}); they must "
            "share one, unless all are codes with scales.\n"
            + _exceptions(checkpoint, experts, formats)
        )
    coded = sorted(str(known[name]) for name in there if not known[name].is_tiled)
    if coded and experts.lies_across:
        raise CheckpointError(
            f"{checkpoint.folder}: experts are stored as {'; '.join(coded)}, with columns of their "
            "matrices as rows of the file, which are read of plain numbers only"
        )
    return formats


def _exceptions(
    checkpoint: Checkpoint,
    experts: StoredExperts,
    formats: Mapping[tuple[int, int], tuple[WeightFormat, ...]],
) -> str:
    """Which weights of experts, of those that are there, are not in the format that most have."""
    stored = {
        name: (layer, size, each)
        for (layer, expert), of_expert in formats.items()
        for (name, size), each in zip(experts.named_weights(layer, expert), of_expert, strict=True)
        if each.parts(name, size)[0].name in checkpoint.tensors
    }
    (usual, count), *_ = Counter(str(each) for _, _, each in stored.values()).most_common()
    others = {name: found for name, found in stored.items() if str(found[2]) != usual}
    name, (_, size, each) = next(iter(others.items()))
    path = checkpoint.tensors[each.parts(name, size)[0].name].path
    where = named_layers(layer for layer, _, _ in others.values())
    return (
        f"{count} of {len(stored)} weights of experts are {usual}, {len(others)} in {where} are "
        f"not: {shown(name)} in {path.name} is {each}"
    )


def _names_of(shape: ModelShape) -> TensorNames:
    return FAMILIES[shape.architecture].names
