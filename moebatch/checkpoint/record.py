"""Tensors that are read together: the pieces to read and where the tensors then lie."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES, DirectFile, align_up
from moebatch.checkpoint.header import Extent

GAP_BYTES = 2 * PAGE_BYTES
"""Most bytes between two tensors that are read together: what a read of its own may take in vain at
its ends, so that gaps never need more room than reads apart."""
PIECE_BYTES = 16 * 2**20
"""Most bytes of one read, and of a chunk. A more urgent one waits at most for those in flight."""
SMALL_BYTES = 2**20
"""A piece of fewer is no chunk of its own: a thread takes about as long to come for it as a disk to
read it (Zen 4: 0.2 ms of a core, in which its disk reads half a MB)."""
RUN_ALIGNMENT = 16
"""Bytes, of tensors that are moved together: a GPU's kernels read so many at a time."""
_CONVERTED_BYTES = 2**16
"""Few enough for torch to take one thread, and to stay in its cache: 2.5 GB/s of bfloat16 on one
of our cores, a fifth of that in one go."""

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Numbers that parts of stored weights are made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One read: an aligned range of a file to a place in the buffer."""

    path: Path
    file_offset: int
    num_bytes: int
    buffer_offset: int
    file_end: int
    """How long the file is at least: up to the last byte of a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor within the buffer."""

    buffer_offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: torch.dtype
    """What its numbers are until they are converted."""


class Buffer(Protocol):
    """Memory that a record is read into."""

    bytes: Tensor
    """Uint8 [bytes]."""

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the bytes from `start`, sharing memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """How to bring some tensors, an expert for example, from disk into one buffer.

    Extents that nearly touch in the file become one run, so an expert whose matrices lie side by
    side is read in one go, with what lies between codes and scales. Runs start at the block of the
    file that holds their first byte, so tensors land at whatever offset within a block they have on
    disk; products do not mind.
    """

    chunks: tuple[tuple[Piece, ...], ...]
    """What a lane reads before it looks again for what is most urgent."""
    places: tuple[Place, ...]
    num_bytes: int
    """Room that the record needs in the buffer, a multiple of `PAGE_BYTES`."""

    @classmethod
    def of(
        cls, extents: Sequence[Extent], dtypes: Sequence[torch.dtype | None] | None = None
    ) -> "Record":
        """The record of `extents`, whose tensors come back in the same order; as numbers of the
        `dtypes`, of as many bytes, of those for which there is one."""
        offsets = [0] * len(extents)
        pieces: list[Piece] = []
        room = 0
        for run in _runs(extents):
            first, last = extents[run[0]], extents[run[-1]]
            start, end = first.offset // PAGE_BYTES * PAGE_BYTES, last.offset + last.num_bytes
            pieces += _pieces(first.path, start, end, room)
            for i in run:
                offsets[i] = room + extents[i].offset - start
            room += align_up(end - start)
        places = tuple(
            Place(
                buffer_offset=offset,
                num_bytes=extent.num_bytes,
                shape=extent.shape,
                dtype=dtype or TORCH_DTYPES[extent.dtype],
                stored=TORCH_DTYPES[extent.dtype],
            )
            for offset, extent, dtype in zip(
                offsets, extents, dtypes or [None] * len(extents), strict=True
            )
        )
        return cls(chunks=_chunks(pieces), places=places, num_bytes=room)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all chunks, in the order of the file."""
        return tuple(chain.from_iterable(self.chunks))

    def tensors(self, buffer: Buffer, start: int) -> tuple[Tensor, ...]:
        """The record's tensors, when it was read into `buffer` from `start`; no copies."""
        return tuple(
            buffer.tensor(start + place.buffer_offset, place.shape, place.dtype)
            for place in self.places
        )

    @property
    def converts(self) -> bool:
        """Whether tensors become other numbers than those of the file."""
        return any(place.dtype != place.stored for place in self.places)

    def convert(self, piece: Piece, buffer: Buffer, start: int) -> None:
        """Numbers of a piece that has been read into `buffer` become those of their tensors, where
        these are others; the record begins at `start`."""
        for place in self.places if self.converts else ():
            first = max(piece.buffer_offset, place.buffer_offset)
            stop = min(piece.buffer_offset + piece.num_bytes, place.buffer_offset + place.num_bytes)
            for begin in range(first, stop, _CONVERTED_BYTES):
                count = min(_CONVERTED_BYTES, stop - begin) // place.stored.itemsize
                numbers = buffer.tensor(start + begin, (count,), place.stored)
                buffer.tensor(start + begin, (count,), place.dtype).copy_(numbers.float())

    def tensor_bytes(self, buffer: Buffer, start: int) -> tuple[Tensor, ...]:
        """The same as bytes, uint8, from the first one of each to the end of the record: of tensors
        that lie one behind the other, those of the first have the others in them."""
        whole = buffer.bytes[start : start + self.num_bytes]
        return tuple(whole[place.buffer_offset :] for place in self.places)


def runs_of(records: Sequence[Record]) -> list[list[int]]:
    """Tensors by number, in the order in which they lie, those together that follow one another in
    every record without a gap, and begin at multiples of `RUN_ALIGNMENT` after the first."""
    first, runs = records[0].places, list[list[int]]()
    for number in sorted(range(len(first)), key=lambda number: first[number].buffer_offset):
        if runs and all(_follows(record.places, runs[-1], number) for record in records):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _follows(places: Sequence[Place], run: Sequence[int], number: int) -> bool:
    begin, last, this = places[run[0]], places[run[-1]], places[number]
    is_next = this.buffer_offset == last.buffer_offset + last.num_bytes
    return is_next and (this.buffer_offset - begin.buffer_offset) % RUN_ALIGNMENT == 0


def slot_bytes(records: Iterable[Record]) -> int:
    """Room that any of `records` fits in: the size of a slot."""
    return max((record.num_bytes for record in records), default=0)


class RecordFiles:
    """The files of some records. Several threads may read them at once."""

    def __init__(self, records: Iterable[Record]) -> None:
        """Raises StorageError where one cannot be opened, or has become shorter since its header
        was read."""
        ends: dict[Path, int] = {}
        for piece in chain.from_iterable(record.pieces for record in records):
            ends[piece.path] = max(piece.file_end, ends.get(piece.path, 0))
        self._files: dict[Path, DirectFile] = {}
        with ExitStack() as opened:
            for path in sorted(ends):
                self._files[path] = opened.enter_context(closing(DirectFile(path)))
                self._files[path].require(ends[path])
            self._opened = opened.pop_all()

    @property
    def is_direct(self) -> bool:
        """Whether all are read past the page cache."""
        return all(file.is_direct for file in self._files.values())

    def read(self, piece: Piece, target: memoryview, start: int = 0) -> None:
        """Fills `target` with what lies from `start` on in a piece, as `DirectFile.read` does."""
        self._files[piece.path].read(target, piece.file_offset + start)

    def close(self) -> None:
        """Gives the files back."""
        self._opened.close()


def _runs(extents: Sequence[Extent]) -> list[list[int]]:
    """Indices of extents in file order, grouped where one begins not far from the end of the
    other."""
    order = sorted(range(len(extents)), key=lambda i: (str(extents[i].path), extents[i].offset))
    runs: list[list[int]] = []
    for i in order:
        before = extents[runs[-1][-1]] if runs else None
        is_near = (
            before is not None
            and before.path == extents[i].path
            and 0 <= extents[i].offset - before.offset - before.num_bytes <= GAP_BYTES
        )
        if is_near:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _pieces(path: Path, start: int, end: int, buffer_offset: int) -> list[Piece]:
    """Those of a run of tensors that ends anywhere within a block."""
    num_bytes = align_up(end - start)
    return [
        Piece(
            path=path,
            file_offset=start + done,
            num_bytes=min(PIECE_BYTES, num_bytes - done),
            buffer_offset=buffer_offset + done,
            file_end=min(start + done + PIECE_BYTES, end),
        )
        for done in range(0, num_bytes, PIECE_BYTES)
    ]


def _chunks(pieces: Iterable[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """Small ones join those beside them: biases, and scales apart from their codes."""
    chunks: list[tuple[Piece, ...]] = []
    for piece in pieces:
        before = num_bytes_of(chunks[-1]) if chunks else 0
        is_small = min(before, piece.num_bytes) < SMALL_BYTES
        if before and is_small and before + piece.num_bytes <= PIECE_BYTES:
            chunks[-1] += (piece,)
        else:
            chunks.append((piece,))
    return tuple(chunks)


def num_bytes_of(chunk: Iterable[Piece]) -> int:
    return sum(piece.num_bytes for piece in chunk)
