"""safetensors files whose contents are known before the first byte is written."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES, align_up
from moebatch.formats.weight_format import StoredPart
from moebatch.journal.files import Files, NewFile, storage_errors

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
        """Of the file."""
        return len(self.header) + sum(part.num_bytes for part in self.parts)


class ShardWriter:
    """Writes the tensors of a shard one after the other; the file has its name when all of it is
    on the disk."""

    def __init__(self, shard: Shard, folder: Path) -> None:
        """Raises StorageError."""
        self._shard, self._files = shard, Files()
        self._path = folder / shard.name
        self._draft = folder / f".{shard.name}.draft"
        self._next = 0
        self._missing = 0
        with self._storage_errors():
            self._files.remove(self._draft)  # of a process that was killed
            self._file = NewFile(self._files, self._draft)
            self._file.write(shard.header)

    def write(self, part: StoredPart, data: bytes | memoryview) -> None:
        """The next tensor, or the next bytes of it. Raises StorageError."""
        if not self._missing:
            assert part == self._shard.parts[self._next], f"{part.name} is not what comes next"
            self._missing, self._next = part.num_bytes, self._next + 1
        self._missing -= len(data)
        assert self._missing >= 0, f"{part.name} has more bytes than its header says"
        with self._storage_errors():
            self._file.write(bytes(data))

    def finish(self) -> None:
        """Raises StorageError."""
        is_whole = self._next == len(self._shard.parts) and not self._missing
        assert is_whole, f"{self._shard.name} lacks tensors"
        with self._storage_errors():
            self._file.sync()
            self._file.close()
            self._files.replace(self._draft, self._path)
            self._files.sync_folder(self._path.parent)

    def drop(self) -> None:
        """Gives up what is written."""
        with suppress(OSError):
            self._file.close()
            self._files.remove(self._draft)

    def _storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(self._path, needed=self._shard.num_bytes)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """As they lie in a file."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def weight_map(shards: Sequence[Shard]) -> Mapping[str, str]:
    """The file of each tensor, by name."""
    return {part.name: shard.name for shard in shards for part in shard.parts}
