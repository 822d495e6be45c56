"""What a format of stored weights says: the tensors on disk, their bytes, the matrix they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, TypeAlias

from moebatch.formats.coded import CodedMatrix

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of a number, by the names that safetensors files use."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a file that holds a weight, or a part of it."""

    name: str
    dtype: str
    """In safetensors' spelling, such as ``BF16``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return ceil(prod(self.shape) * DTYPE_BITS[self.dtype] / 8)


class WeightFormat(ABC):
    """A way in which checkpoints store a weight of a given name and shape [..., rows, columns].

    Every part has the leading sizes of the weight, so that stacked experts can be read one by one,
    and rows in proportion to those of the weight, so that stacked matrices can be taken apart.
    """

    name: str
    """As messages name it."""
    quant_method: str | None = None
    """By which ``quantization_config`` in ``config.json`` names it."""
    is_decodable = True
    """False where it can be planned only."""
    is_tiled = False
    """Products read the stored numbers tile by tile, where the program's own kernels multiply;
    otherwise the whole matrix is decoded before each product."""
    is_coded = False
    """`coded` answers for every weight, so that the program's own kernels need no room to decode."""

    @abstractmethod
    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """The tensors of a file that hold the weight `name`."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Writes the weight that `parts` hold into `out`, which is of its shape and of the dtype in
        which products are computed."""

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix | None:
        """The matrix that `parts` hold as the compiled kernels read it, views only; None where
        only `decode` knows how. Both give the same numbers, bit for bit."""
        return None

    def is_computed_in(self, dtype: str) -> bool:
        """Whether products in ``float32``, ``bfloat16`` or ``float16`` take it as it is stored."""
        return False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight of that shape in the file."""
        return sum(part.num_bytes for part in self.parts("", shape))

    def is_found(
        self, name: str, shape: tuple[int, ...], dtype_of: Callable[[str], str | None]
    ) -> bool:
        """Whether a checkpoint stores the weight `name` so; `dtype_of` says what its tensors are,
        None for one that it lacks. Shapes are not compared."""
        return all(dtype_of(part.name) == part.dtype for part in self.parts(name, shape))


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix in a format of which products need a decoded copy."""

    format: WeightFormat
    parts: tuple[Tensor, ...]
    shape: tuple[int, int]


Matrix: TypeAlias = "Tensor | StoredMatrix"
"""A matrix as products take it: numbers that they read themselves, or what has to be decoded."""
