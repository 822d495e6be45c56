"""safetensors files whose contents are known before the first byte is written."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES, align_up
from moebatch.formats.weight_format import StoredPart
from moebatch.journal.files import Files, NewFile, replacing, storage_errors

_METADATA = {"__metadata__": {"format": "pt"}}
"""transformers refuses files that do not say so."""


@dataclass(frozen=True)
class Shard:
    """A file of a checkpoint: tensors in the order in which their bytes lie."""

    name: str
    parts: Sequence[StoredPart]
    layer: int | None = None
    """The layer whose experts it holds; None for copies of everything else."""

    @cached_property
    def header(self) -> bytes:
        """What stands before the tensors, filled up so that the first one begins with a page. The
        others follow without gaps, which the format does not allow: experts of whole pages all
        begin with one, others share a page with their neighbours."""
        entries: dict[str, object] = dict(_METADATA)
        end = 0
        for part in self.parts:
            begin, end = end, end + part.num_bytes
            entries[part.name] = {
                "dtype": part.dtype,
                "shape": part.shape,
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        room = align_up(8 + len(text), PAGE_BYTES) - 8
        return room.to_bytes(8, "little") + text.ljust(room)

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(part.num_bytes for part in self.parts)


class ShardWriter:
    """Writes the tensors of a shard one after the other."""

    def __init__(self, shard: Shard, file: NewFile) -> None:
        """Raises OSError."""
        self._shard, self._file = shard, file
        self._next = 0
        self._missing = 0
        file.write(shard.header)

    def write(self, part: StoredPart, data: bytes | memoryview) -> None:
        """The next tensor, or the next bytes of it. Raises OSError."""
        if not self._missing:
            assert part == self._shard.parts[self._next], f"{part.name} is not what comes next"
            self._missing, self._next = part.num_bytes, self._next + 1
        self._missing -= len(data)
        assert self._missing >= 0, f"{part.name} has more bytes than its header says"
        self._file.write(bytes(data))

    @property
    def is_whole(self) -> bool:
        """Whether all tensors have been written."""
        return self._next == len(self._shard.parts) and not self._missing


@contextmanager
def writing(shard: Shard, folder: Path) -> Iterator[ShardWriter]:
    """The writer of a shard, whose file has its name when all of it is on the disk. Raises
    StorageError."""
    path = folder / shard.name
    with storage_errors(path, needed=shard.num_bytes), replacing(Files(), path) as file:
        writer = ShardWriter(shard, file)
        yield writer
        assert writer.is_whole, f"{shard.name} lacks tensors"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """As they lie in a file."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def weight_map(shards: Sequence[Shard]) -> Mapping[str, str]:
    """The file of each tensor, by name."""
    return {part.name: shard.name for shard in shards for part in shard.parts}
