"""Reads experts and encodes them, on all processors.

Shape letters: O rows (outputs), I columns (inputs).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import isfinite, prod
from typing import Self

import torch
from torch import Tensor

from moebatch.checkpoint.record import slot_bytes
from moebatch.errors import CheckpointError
from moebatch.formats.weight_format import Matrix, StoredMatrix, StoredPart
from moebatch.measure.process_limits import detect_machine
from moebatch.packing.contents import Contents
from moebatch.packing.encodings import Encoding
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.store.experts.page_sources import FilePages
from moebatch.store.memory import Arena

_PORTION = 2**18
"""Numbers that a thread encodes at a time: what it makes of them stays in the cache."""
_NUMBER_BYTES = 40
"""What a number takes while it is encoded, with its codes and what readers make of them."""


@dataclass(slots=True)
class Error:
    """How far what readers decode is from the weights."""

    squared_difference: float = 0.0
    squared_weight: float = 0.0

    def add(self, other: "Error") -> None:
        """Of both together."""
        self.squared_difference += other.squared_difference
        self.squared_weight += other.squared_weight

    @property
    def relative(self) -> float:
        """|decoded - weight| / |weight|."""
        return float((self.squared_difference / (self.squared_weight or 1.0)) ** 0.5)


_Portion = tuple[tuple[Tensor, ...], Error]
"""What is made of some rows, and how far it is from them."""


def encoder_bytes(contents: Contents) -> int:
    """Memory that an `ExpertEncoder` takes: an expert as it is stored, once more decoded or
    encoded, and what threads work with."""
    files = contents.files
    largest = max(map(prod, files.shape.expert.matrices(files.shape.expert_size).values()))
    threads = detect_machine().num_cores * _PORTION * _NUMBER_BYTES
    decoded = 0 if files.experts.format.is_tiled else 4 * largest
    return slot_bytes(files.expert_records().values()) + 2 * largest + decoded + threads


class ExpertEncoder:
    """Encodes experts one by one, in portions of rows for each thread."""

    def __init__(self, contents: Contents) -> None:
        """Raises StorageError if a file cannot be opened."""
        self._contents = contents
        self._pages = FilePages(contents.files.expert_records())
        self._slot = Arena(self._pages.slot_bytes).bytes
        self._pool = ThreadPoolExecutor(detect_machine().num_cores)
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # portions are what runs at the same time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._pages.close()
        torch.set_num_threads(self._num_threads)

    def encoded(
        self, key: ExpertKey, encoding: Encoding, error: Error
    ) -> Iterator[tuple[StoredPart, Tensor]]:
        """The tensors of an expert in the order of its parts; adds up `error`.

        Raises CheckpointError for weights that are no numbers, and StorageError.
        """
        self._pages.load({key: self._slot})
        tensors = self._pages.tensors(key, self._slot)
        matrices = self._contents.files.experts.matrices(tensors, *key)
        for role, name, size in self._contents.matrices(key):
            portions = self._portions(matrices[role], encoding)
            of_matrix = Error()
            for _, of_portion in portions:
                of_matrix.add(of_portion)
            if not isfinite(of_matrix.squared_difference):
                folder = self._contents.files.checkpoint.folder
                raise CheckpointError(f"{folder}: {name} has weights that are no finite numbers")
            error.add(of_matrix)
            by_part = zip(*(encoded for encoded, _ in portions), strict=True)
            for part, pieces in zip(encoding.parts(name, size), by_part, strict=True):
                yield part, torch.cat(pieces)

    def _portions(self, matrix: Matrix, encoding: Encoding) -> list[_Portion]:
        weight_OI = _numbers(matrix)
        rows = max(1, _PORTION // weight_OI.shape[1] // encoding.rows) * encoding.rows
        return list(self._pool.map(partial(_encode, encoding), torch.split(weight_OI, rows)))


def _encode(encoding: Encoding, stored_OI: Tensor) -> _Portion:
    weight_OI = stored_OI.float().contiguous()  # files may have columns as rows
    tensors = encoding.encode(weight_OI)
    difference = _squared(encoding.decoded(tensors, weight_OI.shape).sub_(weight_OI))
    return tensors, Error(difference, _squared(weight_OI))


def _squared(numbers_OI: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers_OI, dtype=torch.float64)) ** 2


def _numbers(matrix: Matrix) -> Tensor:
    """The matrix in the numbers it is stored in, or decoded."""
    if not isinstance(matrix, StoredMatrix):
        return matrix
    weight_OI = torch.empty(matrix.shape, dtype=torch.float32)
    matrix.format.decode(matrix.parts, weight_OI)
    return weight_OI
