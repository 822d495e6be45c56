"""Experts from their files into packed slots, before anything is computed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.copy_bytes import copy_bytes
from moebatch.store.memory import Arena
from moebatch.store.packed import PackedLayout
from moebatch.store.record import Record, open_files


def load_packed(
    records: Mapping[ExpertKey, Record], layout: PackedLayout, rooms: Mapping[ExpertKey, Tensor]
) -> None:
    """Reads the experts of `rooms` into their slots, piece by piece through a small window, so that
    nothing of them stays in main memory. Raises StorageError when reading fails.
    """
    pieces = [(key, piece) for key in rooms for piece in records[key].pieces]
    window = Arena(max((piece.num_bytes for _, piece in pieces), default=0))
    files = open_files(records[key] for key in rooms)
    for key, piece in pieces:
        files[piece.path].read(window.view(0, piece.num_bytes), piece.file_offset)
        start, stop = piece.buffer_offset, piece.buffer_offset + piece.num_bytes
        for place, offset in zip(records[key].places, layout.offsets, strict=True):
            first = max(start, place.buffer_offset)
            num_bytes = min(stop, place.buffer_offset + place.num_bytes) - first
            if num_bytes > 0:
                to = offset + first - place.buffer_offset
                source = window.bytes[first - start : first - start + num_bytes]
                # From memory that is not pinned, this returns when it may be filled again.
                copy_bytes(rooms[key][to : to + num_bytes], source)
    for file in files.values():
        file.close()
    if any(room.device.type == "cuda" for room in rooms.values()):
        torch.cuda.synchronize()  # copies run on whatever stream is next
