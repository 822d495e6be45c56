"""Experts packed: the layout that all slots of a device share, whatever files they come from."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.checkpoint.direct import align_up
from moebatch.checkpoint.record import Record, RecordFiles, runs_of
from moebatch.errors import CheckpointError
from moebatch.layout.footprint import PACKED_ALIGNMENT
from moebatch.layout.placed import CHUNK_BYTES
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.memory import Arena, copy_bytes


class Run(NamedTuple):
    """Tensors of an expert that lie one behind the other."""

    tensor: int
    """The first one."""
    offset: int
    """Where it begins in the slot."""
    num_bytes: int


class Part(NamedTuple):
    """Bytes of a run that are copied at once."""

    tensor: int
    """The first of the run."""
    start: int
    """First byte within the run."""
    offset: int
    """Where it goes in the slot."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedChunk:
    """A contiguous part of a packed expert."""

    start: int
    stop: int
    """The range of the slot, gaps between runs included."""
    parts: tuple[Part, ...]
    num_bytes: int
    """Bytes that are moved."""

    def copy(self, sources: Sequence[Tensor], room: Tensor) -> None:
        """Copies from the expert, given as the bytes from each tensor on, into its range of a
        slot."""
        copy_parts(self.parts, sources, room, self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """Each tensor of an expert at an offset that is the same in all slots: slots are stacked
    weights. Tensors that lie one behind the other in every expert do so here, and are copied in one
    piece. Such runs are aligned to `PACKED_ALIGNMENT`."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    """Room of a slot."""
    runs: tuple[Run, ...]
    chunks: tuple[PackedChunk, ...]

    @classmethod
    def of(cls, records: Iterable[Record], chunk_bytes: int = CHUNK_BYTES) -> "PackedLayout":
        """The layout of experts that are all alike, in chunks of nearly equal, aligned size."""
        records = tuple(records)
        kinds = {tuple((place.shape, place.dtype) for place in record.places) for record in records}
        if len(kinds) > 1:
            raise CheckpointError(
                "experts are not stored all alike, and such are computed in main memory only; set "
                "resources.device: cpu, or pack the model without --bits"
            )
        (tensors,) = kinds
        sizes = [_tensor_bytes(shape, dtype) for shape, dtype in tensors]
        offsets, runs, num_bytes = [0] * len(sizes), [], 0
        for numbers in runs_of(records):
            *starts, stop = accumulate((sizes[n] for n in numbers), initial=num_bytes)
            for number, start in zip(numbers, starts, strict=True):
                offsets[number] = start
            runs.append(Run(numbers[0], num_bytes, stop - num_bytes))
            num_bytes = align_up(stop, PACKED_ALIGNMENT)
        return cls(
            shapes=tuple(shape for shape, _ in tensors),
            dtypes=tuple(dtype for _, dtype in tensors),
            offsets=tuple(offsets),
            num_bytes=num_bytes,
            runs=tuple(runs),
            chunks=tuple(_chunks(runs, chunk_bytes)),
        )

    def parts(self, start: int, stop: int) -> tuple[Part, ...]:
        """What lies in a range of a slot, run by run; gaps between runs are nothing."""
        return _parts(self.runs, start, stop)

    def tensors(self, room: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the expert in a slot, uint8 [slot bytes]; no copies."""
        return tuple(
            room[offset : offset + _tensor_bytes(shape, dtype)].view(dtype).view(shape)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        )

    def stacked(self, rooms: Tensor) -> tuple[Tensor, ...]:
        """Each tensor over all slots, [slots, *its shape], of uint8 [slots * slot bytes]."""
        by_slot = rooms.view(-1, self.num_bytes)
        return tuple(
            by_slot[:, offset : offset + _tensor_bytes(shape, dtype)]
            .view(dtype)
            .view(len(by_slot), *shape)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        )


def copy_parts(parts: Iterable[Part], sources: Sequence[Tensor], room: Tensor, start: int) -> None:
    """Copies parts of runs, given as the bytes from each tensor on, into a range of a slot that
    begins at `start`."""
    for tensor, first, offset, num_bytes in parts:
        to = offset - start
        copy_bytes(room[to : to + num_bytes], sources[tensor][first : first + num_bytes])


def load_packed(
    records: Mapping[ExpertKey, Record], layout: PackedLayout, rooms: Mapping[ExpertKey, Tensor]
) -> None:
    """Reads the experts of `rooms` into their slots, piece by piece through a small window, so that
    nothing of them stays in main memory. Raises StorageError when reading fails.
    """
    pieces = [(key, piece) for key in rooms for piece in records[key].pieces]
    window = Arena(max((piece.num_bytes for _, piece in pieces), default=0))
    with closing(RecordFiles(records[key] for key in rooms)) as files:
        for key, piece in pieces:
            files.read(piece, window.view(0, piece.num_bytes))
            records[key].convert(piece, window, -piece.buffer_offset)
            start, stop = piece.buffer_offset, piece.buffer_offset + piece.num_bytes
            for place, offset in zip(records[key].places, layout.offsets, strict=True):
                first = max(start, place.buffer_offset)
                num_bytes = min(stop, place.buffer_offset + place.num_bytes) - first
                if num_bytes > 0:
                    to = offset + first - place.buffer_offset
                    source = window.bytes[first - start : first - start + num_bytes]
                    # From memory that is not pinned, this returns when it may be filled again.
                    copy_bytes(rooms[key][to : to + num_bytes], source)
    if any(room.device.type == "cuda" for room in rooms.values()):
        torch.cuda.synchronize()  # copies run on whatever stream is next


def _tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _chunks(runs: Sequence[Run], chunk_bytes: int) -> list[PackedChunk]:
    end = runs[-1].offset + runs[-1].num_bytes
    count = -(-end // chunk_bytes)
    step = align_up(-(-end // count), PACKED_ALIGNMENT)
    chunks = []
    for start in range(0, end, step):
        stop = min(start + step, end)
        parts = _parts(runs, start, stop)
        num_bytes = sum(part.num_bytes for part in parts)
        chunks.append(PackedChunk(start=start, stop=stop, parts=parts, num_bytes=num_bytes))
    return chunks


def _parts(runs: Iterable[Run], start: int, stop: int) -> tuple[Part, ...]:
    parts = []
    for tensor, offset, size in runs:
        first, last = max(start, offset), min(stop, offset + size)
        if first < last:
            parts.append(Part(tensor, first - offset, first, last - first))
    return tuple(parts)
