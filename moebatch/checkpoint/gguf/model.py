"""A model in GGUF, one file or several, as a checkpoint and the configuration it stands for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moebatch.checkpoint.gguf.families import family_of
from moebatch.checkpoint.gguf.family import Arranged, GgufMetadata
from moebatch.checkpoint.gguf.header import GgufHeader, read_gguf_header
from moebatch.checkpoint.header import Extent
from moebatch.checkpoint.index import (
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    file_inside,
    stamps_of,
)
from moebatch.errors import CheckpointError
from moebatch.formats.ggml import GgmlRows
from moebatch.formats.ggml_rearranged import Rearranged
from moebatch.formats.weight_format import WeightFormat
from moebatch.quoting import shown
from moebatch.spec.files.gguf_file import is_gguf_file
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_runnable_shape

_SUFFIX = ".gguf"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_SHARDS = 1000
_EMBEDDING = "token_embd.weight"


def find_gguf(path: Path) -> tuple[str, ...]:
    """Names of the files of the model that `path`, a GGUF file or a model folder, holds in that
    format; none where it is another one. Raises CheckpointError."""
    if is_gguf_file(path):
        return _with_shards(path.parent, path.name)
    if any((path / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
        return ()
    names = sorted(each.name for each in path.glob(f"*{_SUFFIX}"))
    first = [name for name in names if not (match := _SHARD.fullmatch(name)) or int(match[2]) == 1]
    if len(first) > 1:
        several = ", ".join(map(shown, first[:4]))
        raise CheckpointError(f"{path}: holds several models ({several}); name the file of one")
    return _with_shards(path, (first or names)[0]) if names else ()


def open_gguf(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], ModelShape, Checkpoint]:
    """The configuration as ``config.json`` would have it, what it describes, and the tensors.

    Raises CheckpointError for damaged files and for models that are not read.
    """
    files = {name: file_inside(folder, name) for name in names}
    stamps = stamps_of(files)
    headers = [read_gguf_header(path) for path in files.values()]
    _require_parts(folder, names, headers)
    tensors: dict[str, Extent] = {}
    formats: dict[str, GgmlRows] = {}
    for file, header in zip(files, headers, strict=True):
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            fault = f"tensor {shown(min(twice))} is in another file as well"
            raise CheckpointError(f"{folder / file}: {fault}")
        tensors |= {name: _with_rows(name, each) for name, each in header.tensors.items()}
        formats |= header.formats
    said = GgufMetadata(folder / names[0], headers[0].metadata, tensors)
    family = family_of(said)
    if _EMBEDDING not in tensors:
        raise said.fault(f"tensor {_EMBEDDING} is missing")
    vocab_size = tensors[_EMBEDDING].shape[0]
    config = family.config(said, vocab_size, is_tied="output.weight" not in tensors)
    arranged = _rearranged(family.arranged(said), tensors, formats)
    checkpoint = Checkpoint(
        folder=folder,
        tensors=tensors,
        files=files,
        formats={**formats, **arranged},
        is_gguf=True,
        stamps=stamps,
    )
    shape = read_runnable_shape(config, str(said.where))
    said.require_scores(shape.router)
    return config, shape, checkpoint


def _require_parts(folder: Path, names: Sequence[str], headers: Sequence[GgufHeader]) -> None:
    """Raises CheckpointError where files, in the order of their names, are not all of one model, in
    that order, by what they say. A file that was put together says that it is one of none."""
    for number, (name, header) in enumerate(zip(names, headers, strict=True), start=1):
        place, count = (header.metadata.get(f"split.{key}") for key in ("no", "count"))
        if count not in (None, 0) and (place, count) != (number - 1, len(names)):
            own = place + 1 if type(place) is int else shown(place)
            raise CheckpointError(
                f"{folder / name}: says that it is file {own} of {shown(count)}, and its name that "
                f"it is file {number} of {len(names)}"
            )
    said = headers[0].metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if len(names) > 1 and said not in (None, found):
        raise CheckpointError(
            f"{folder}: files of {shown(names[0])} hold {found} tensors, of {shown(said)} that the "
            "first says; are they of one model?"
        )


def _with_shards(folder: Path, name: str) -> tuple[str, ...]:
    match = _SHARD.fullmatch(name)
    if match is None:
        return (name,)
    count = int(match[3])
    if not 0 < count <= _MOST_SHARDS:
        raise CheckpointError(
            f"{folder}: {shown(name)} is of {count} files, at most {_MOST_SHARDS}"
        )
    numbers = range(1, count + 1)
    return tuple(f"{match[1]}-{number:05}-of-{count:05}{_SUFFIX}" for number in numbers)


def _with_rows(name: str, entry: Extent) -> Extent:
    """The gate of a shared expert is a matrix of one row, which GGUF keeps as a vector; what
    corrects a router and the norm behind a recurrence are vectors, which it may keep as one; and
    what heads fade by, and convolutions of queries, keys and values apart, are matrices, which it
    may keep with more dimensions, of one."""
    if name.endswith("ffn_gate_inp_shexp.weight") and len(entry.shape) == 1:
        return replace(entry, shape=(1, *entry.shape))
    if name.endswith(("exp_probs_b.bias", "ssm_norm.weight")) and entry.shape[0] == 1:
        return replace(entry, shape=entry.shape[1:] or entry.shape)
    if name.endswith("ssm_a") or ".ssm_conv1d_" in name:
        *others, last = entry.shape
        return replace(entry, shape=(*(size for size in others if size > 1), last))
    return entry


def _rearranged(
    arranged: Arranged, tensors: Mapping[str, Extent], formats: Mapping[str, GgmlRows]
) -> dict[str, WeightFormat]:
    """Formats of weights, in any layer or in none, that are not as the model has them."""
    found: dict[str, WeightFormat] = {}
    for place in {_place(name) for name in tensors}:
        for weight, arrangement in arranged.items():
            names = arrangement.tensors or (weight,)
            stored = [place + name for name in names]
            is_whole = weight not in names and place + weight in tensors
            if is_whole or not all(name in tensors for name in stored):
                continue
            # Numbers have no format of their own.
            rows = tuple(
                (name, formats.get(name) or GgmlRows(type=tensors[name].dtype)) for name in stored
            )
            found[place + weight] = Rearranged(stored=rows, arrangement=arrangement)
    return found


def _place(name: str) -> str:
    """How the names of all tensors of its layer begin; nothing of one that is in none."""
    block, number, *rest = (*name.split("."), "", "")
    return f"{block}.{number}." if block == "blk" and any(rest) else ""
