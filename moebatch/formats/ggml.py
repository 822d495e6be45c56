"""Numbers as GGUF files hold them: rows of blocks, each with its codes and scales side by side.

The gguf package says which types there are, and what the blocks of each stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from moebatch.formats.coded import GGML_BLOCKS, CodedMatrix, block_numbers
from moebatch.formats.weight_format import StoredPart, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

PLAIN_TYPES = ("F32", "F16", "BF16")
"""Numbers one after the other, in safetensors' spelling as well."""
BLOCK_TYPES = (*(numbers.upper() for numbers in GGML_BLOCKS), "TQ1_0", "TQ2_0", "NVFP4")
"""The others that weights may have and whose decoding is measured."""


@dataclass(frozen=True, kw_only=True)
class GgmlRows(WeightFormat):
    """One tensor. Nothing in it says which type it has: the header of its file does."""

    type: str
    """As ggml names it, such as ``Q4_K``."""
    block: int = 1
    """Numbers of a block."""
    block_bytes: int = 0

    @property
    def name(self) -> str:  # type: ignore[override]
        return format_name(self.type)

    @property
    def is_coded(self) -> bool:  # type: ignore[override]
        return block_numbers(self.type) is not None

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """The tensor, as bytes where it has blocks."""
        if self.type in PLAIN_TYPES:
            return (StoredPart(name, self.type, shape),)
        *rows, columns = shape
        return (StoredPart(name, "U8", (*rows, -(-columns // self.block) * self.block_bytes)),)

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix | None:
        """The blocks as they lie, of which rows in files have whole ones."""
        numbers = block_numbers(self.type)
        if numbers is None or shape[1] % self.block:
            return None
        from moebatch.formats.ggml_decoding import values_of

        return CodedMatrix(
            numbers=numbers,
            codes=parts[0],
            scales=None,
            block=(1, self.block),
            shape=shape,
            values=values_of(numbers),
        )

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """In float32, as the gguf package does, then rounded."""
        from moebatch.formats.ggml_decoding import decode_ggml

        decode_ggml(parts[0], out, self.type)


def format_name(type_name: str) -> str:
    """Of the format of a type."""
    return f"gguf {type_name.lower()}"


@cache
def ggml_types() -> Mapping[int, GgmlRows]:
    """Those that ggml has, by its numbers, without bytes where the gguf package does not decode
    them. Raises ImportError without that package."""
    import gguf
    import numpy as np

    def decodes(kind: gguf.GGMLQuantizationType, num_bytes: int) -> bool:
        if kind.name in PLAIN_TYPES:
            return True
        try:
            gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    with np.errstate(all="ignore"):
        return {
            int(kind): GgmlRows(
                type=kind.name, block=block, block_bytes=num_bytes * decodes(kind, num_bytes)
            )
            for kind, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items()
        }


def decoded_types() -> tuple[GgmlRows, ...]:
    """Those of `BLOCK_TYPES` that can be decoded; none without the gguf package."""
    try:
        known = ggml_types().values()
    except ImportError:
        return ()
    return tuple(each for each in known if each.type in BLOCK_TYPES and each.block_bytes)
