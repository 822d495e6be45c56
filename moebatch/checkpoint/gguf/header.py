"""The header of a GGUF file, held to every rule of the format before a byte is used.

Its versions 2 and 3, little-endian: metadata, then name, sizes, type and place of each tensor.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moebatch.checkpoint.header import MAX_HEADER_BYTES, MAX_TENSORS, Extent
from moebatch.errors import CheckpointError
from moebatch.formats.ggml import PLAIN_TYPES, GgmlRows, ggml_types
from moebatch.formats.weight_format import StoredPart
from moebatch.quoting import shown
from moebatch.spec.files.json_file import LFS_POINTER, NOT_FETCHED, readable

Value = int | float | bool | str | list[int | float | bool]
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _LIST = 8, 9
_FLOAT32 = 6
"""A number of few digits, as a configuration has it: 1e-06 and not 9.99999997e-07."""
_MOST_KEPT = 2**16
"""Longest list that is kept, by layer for one; vocabularies are longer, and left aside."""
_MOST_KEPT_IN_ALL = 2**20
"""Numbers of such lists: each takes many times its bytes."""
_MOST_KEYS = 2**16
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """What a file says of itself and of its tensors, whose sizes are given rows first."""

    metadata: Mapping[str, Value]
    """Without lists of texts."""
    tensors: Mapping[str, Extent]
    """Blocks as bytes."""
    formats: Mapping[str, GgmlRows]
    """Of tensors that consist of blocks."""


class _Broken(ValueError):
    """What is wrong with a file."""


class _Bytes:
    """The bytes of a file, one after the other, up to those that a header may have."""

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self._file, self.file_bytes = file, file_bytes
        self.place = self._num_kept = 0

    def take(self, count: int) -> bytes:
        self.require(count)
        self.place += count
        return self._file.read(count)

    def skip(self, count: int) -> None:
        self.require(count)
        self.place += count
        self._file.seek(count, 1)

    def require(self, count: int) -> None:
        if self.place + count > self.file_bytes:
            raise _Broken(f"the header goes on beyond its {self.file_bytes} bytes; it is truncated")
        if self.place + count > MAX_HEADER_BYTES:
            raise _Broken(f"the header has more than {MAX_HEADER_BYTES} bytes, the most allowed")

    def number(self, layout: str) -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def text(self) -> str:
        text = self.take(self.number("<Q"))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise _Broken(f"{shown(text[:40])} is no text that UTF-8 can hold") from None

    def value(self, kind: int) -> Value | None:
        """None for what is not kept."""
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            value: Any
            (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise _Broken(f"a value of type {kind}, which GGUF does not have")
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _TEXT:
            self.require(count * struct.calcsize("<Q"))  # each has a length
            for _ in range(count):
                self.skip(self.number("<Q"))
            return None
        if kind not in _SCALARS:
            raise _Broken(f"a list of values of type {kind}, which is not read")
        num_bytes = count * struct.calcsize(_SCALARS[kind])
        if count > _MOST_KEPT:
            self.skip(num_bytes)
            return None
        self._num_kept += count
        if self._num_kept > _MOST_KEPT_IN_ALL:
            raise _Broken(f"its lists have more than {_MOST_KEPT_IN_ALL} numbers, the most allowed")
        return [value for (value,) in struct.iter_unpack(_SCALARS[kind], self.take(num_bytes))]


def read_gguf_header(path: Path) -> GgufHeader:
    """Metadata and tensors of the file at `path`.

    Raises CheckpointError, naming the file and the rule, where the file breaks the format, where a
    tensor is of a type that the gguf package does not decode, and without that package.
    """
    try:
        with readable(path), path.open("rb") as file:
            return _header(path, _Bytes(file, path.stat().st_size))
    except _Broken as error:
        raise CheckpointError(f"{path}: {error}") from None


def _header(path: Path, taken: _Bytes) -> GgufHeader:
    magic = taken.take(len(_MAGIC))
    if LFS_POINTER.startswith(magic):
        raise _Broken(NOT_FETCHED)
    if magic != _MAGIC:
        raise _Broken("does not start with GGUF; is this a GGUF file?")
    version = taken.number("<I")
    if version not in _VERSIONS:
        raise _Broken(f"version {version} of GGUF; 2 and 3 are read, in little-endian order")
    num_tensors, num_keys = taken.number("<Q"), taken.number("<Q")
    if num_tensors > MAX_TENSORS or num_keys > _MOST_KEYS:
        raise _Broken(f"{num_tensors} tensors and {num_keys} keys are more than a file may have")
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = taken.text()
        if key in metadata:
            raise _Broken(f"key {shown(key)} occurs twice")
        value = taken.value(taken.number("<I"))
        if value is not None:
            metadata[key] = value
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_HEADER_BYTES or alignment % 8:
        raise _Broken(f"general.alignment is {shown(alignment)}, expected a multiple of 8")
    found = [_tensor(taken) for _ in range(num_tensors)]
    start = -(-taken.place // alignment) * alignment
    tensors = _placed(path, found, start, taken.file_bytes)
    formats = {part.name: rows for part, rows, _ in found if rows.type not in PLAIN_TYPES}
    return GgufHeader(metadata=metadata, tensors=tensors, formats=formats)


_Tensor = tuple[StoredPart, GgmlRows, int]
"""What it is, its format, and where it begins behind the header."""


def _tensor(taken: _Bytes) -> _Tensor:
    name, num_dimensions = taken.text(), taken.number("<I")
    if not 0 < num_dimensions <= _MOST_DIMENSIONS:
        raise _Broken(f"tensor {shown(name)} has {num_dimensions} dimensions")
    shape = tuple(taken.number("<Q") for _ in range(num_dimensions))[::-1]
    stored, offset = _format(name, taken.number("<I")), taken.number("<Q")
    if prod(shape) >= 2**63:
        raise _Broken(
            f"tensor {shown(name)} of shape {list(shape)} has more numbers than a file can hold"
        )
    if shape[-1] % stored.block:
        raise _Broken(
            f"tensor {shown(name)} of shape {list(shape)} is no {stored.type}, whose rows are "
            f"multiples of {stored.block}"
        )
    (part,) = stored.parts(name, shape)
    return part, stored, offset


def _format(name: str, number: int) -> GgmlRows:
    try:
        known = ggml_types().get(number)
    except ImportError:
        raise _Broken("reading GGUF needs the package gguf: pip install 'moebatch[gguf]'") from None
    if known is None:
        raise _Broken(f"tensor {shown(name)} is of type {number}, which gguf does not know")
    if known.block_bytes == 0:
        raise _Broken(f"tensor {shown(name)} is of type {known.type}, which gguf does not decode")
    return known


def _placed(path: Path, found: Sequence[_Tensor], start: int, file_bytes: int) -> dict[str, Extent]:
    tensors: dict[str, Extent] = {}
    end = start
    for part, _, behind in sorted(found, key=lambda each: each[2]):
        name, offset, num_bytes = part.name, start + behind, part.num_bytes
        if name in tensors:
            raise _Broken(f"tensor {shown(name)} occurs twice")
        if offset < end:
            raise _Broken(f"tensor {shown(name)} overlaps the one before it")
        end = offset + num_bytes
        if end > file_bytes:
            raise _Broken(
                f"tensor {shown(name)} ends at byte {end}, the file has {file_bytes} bytes; it is "
                "truncated"
            )
        tensors[name] = Extent(
            path=path, offset=offset, num_bytes=num_bytes, dtype=part.dtype, shape=part.shape
        )
    return tensors
