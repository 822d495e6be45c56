"""Numbers one after the other, without scales: how models are released that are not quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moebatch.formats.weight_format import StoredPart, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor


class PlainFormat(WeightFormat):
    """One tensor of the weight's own name and shape."""

    is_tiled = True

    def __init__(self, name: str, dtype: str) -> None:
        """`name` is that of the numbers in job files, `dtype` the one in safetensors files."""
        self.name = name
        self.dtype = dtype

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        return (StoredPart(name, self.dtype, shape),)

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(parts[0])

    def is_computed_in(self, dtype: str) -> bool:
        return dtype == self.name


class TransposedFormat(PlainFormat):
    """Numbers of matrices some of which lie column by column: products may need a copy that lies
    otherwise."""

    is_tiled = False

    def is_computed_in(self, dtype: str) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.name}, transposed"


FLOAT32 = PlainFormat("float32", "F32")
BFLOAT16 = PlainFormat("bfloat16", "BF16")
FLOAT16 = PlainFormat("float16", "F16")
TABLES = PlainFormat("int64", "I64"), PlainFormat("int32", "I32")
"""Of what is looked up, which nothing is multiplied with."""
