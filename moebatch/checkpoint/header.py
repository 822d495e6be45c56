"""The header of a safetensors file, held to every rule of the format before a byte is used."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from moebatch.errors import CheckpointError
from moebatch.formats.weight_format import DTYPE_BITS
from moebatch.quoting import is_text, reason, shown
from moebatch.spec.files.json_file import LFS_POINTER, NOT_FETCHED, readable, unique_keys

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_TENSORS = 2**18
"""Of one file: many times what the largest models put into one, and seconds to look at."""
MAX_DIMENSIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A tensor, or one slice along its first dimension, as a range of bytes in a file."""

    path: Path
    offset: int
    num_bytes: int
    dtype: str
    """Name in safetensors' spelling, such as ``BF16``."""
    shape: tuple[int, ...]

    def slice(self, index: int, count: int | None = None) -> "Extent":
        """One slice along the first dimension, or one of `count` that lie there in equal numbers of
        rows."""
        if count is not None:
            height = self.shape[0] // count
            return self.rows(range(index * height, (index + 1) * height))
        return replace(self.rows(range(index, index + 1)), shape=self.shape[1:])

    def rows(self, taken: range) -> "Extent":
        """Some slices along the first dimension."""
        each = self.num_bytes // self.shape[0]
        return replace(
            self,
            offset=self.offset + taken.start * each,
            num_bytes=len(taken) * each,
            shape=(len(taken), *self.shape[1:]),
        )


def read_header(path: Path) -> dict[str, Extent]:
    """Tensors of the safetensors file at `path`.

    Raises CheckpointError, naming the file and the rule, when the file breaks the format: header
    longer than allowed or than the file, not a JSON object, duplicate keys, offsets that overlap
    or leave holes, sizes that disagree with shape and dtype, bytes missing or left over; or when it
    has more than `MAX_TENSORS` tensors or `MAX_DIMENSIONS` dimensions. Raises StorageError if the
    disk fails.
    """
    with readable(path), path.open("rb") as file:
        file_bytes = path.stat().st_size
        prefix = file.read(8)
        header_bytes = _header_length(path, prefix, file_bytes)
        text = file.read(header_bytes)
    return _entries(path, _parse(path, text), data_start=8 + header_bytes, file_bytes=file_bytes)


def _header_length(path: Path, prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {file_bytes} bytes is too short for a safetensors file")
    if LFS_POINTER.startswith(prefix):
        raise CheckpointError(f"{path}: {NOT_FETCHED}")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "is this a safetensors file?"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{path}: header needs {8 + length} bytes, the file has {file_bytes}; it is truncated"
        )
    return length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not start with '{{'")
    if text.count(b"{") > MAX_TENSORS + 2:  # looked at before it grows into objects
        raise CheckpointError(f"{path}: more than {MAX_TENSORS} tensors, the most of one file")
    try:
        return dict(json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {reason(error)}") from None


def _entries(
    path: Path, header: dict[str, Any], *, data_start: int, file_bytes: int
) -> dict[str, Extent]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ may hold strings only")
    nameless = next((name for name in header if not is_text(name)), None)
    if nameless is not None:
        raise CheckpointError(f"{path}: the name {shown(nameless)} is no text that UTF-8 can hold")
    entries = {name: _entry(path, name, raw, data_start) for name, raw in header.items()}
    end = data_start
    for name, entry in sorted(
        entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        if entry.offset != end:
            kind = (
                "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            )
            raise CheckpointError(f"{path}: tensor {shown(name)} {kind}")
        end = entry.offset + entry.num_bytes
    if end != file_bytes:
        raise CheckpointError(
            f"{path}: its tensors end at byte {end}, the file has {file_bytes} bytes; "
            + ("it is truncated" if end > file_bytes else "bytes are left over")
        )
    return entries


def _entry(path: Path, name: str, raw: object, data_start: int) -> Extent:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)}: {why}")

    if not isinstance(raw, Mapping) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise refuse("needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"unknown dtype {shown(dtype)}")
    if not _natural_numbers(shape):
        raise refuse(f"shape {shown(shape)} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise refuse(f"has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are read")
    if not _natural_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"data_offsets {shown(offsets)} are not [begin, end]")
    num_bits = math.prod(shape) * DTYPE_BITS[dtype]
    begin, end = offsets
    if num_bits % 8:
        raise refuse(f"{dtype} of shape {shown(shape)} does not end on a byte")
    if num_bits // 8 != end - begin:
        size = f"{dtype} of shape {shown(shape)} is {shown(num_bits // 8)} bytes"
        raise refuse(f"{size}, its offsets span {end - begin}")
    offset, num_bytes = data_start + begin, end - begin
    return Extent(path=path, offset=offset, num_bytes=num_bytes, dtype=dtype, shape=tuple(shape))


def _natural_numbers(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        for value in values
    )
