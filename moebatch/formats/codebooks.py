"""Four bits that number the values of a codebook: NF4 and FP4 of bitsandbytes (QLoRA, 2023).

A matrix lies as one row of numbers, of which each block has a scale; a block may begin in one row
of the matrix and end in the next. Scales may be of eight bits themselves, with scales of their own
(double quantisation).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from moebatch.formats.quantization import one_of
from moebatch.formats.weight_format import Look, StoredPart, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from moebatch.formats.coded import CodedMatrix

_BLOCK, _NESTED_BLOCK = 64, 256
_BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)
"""Those of bitsandbytes, the usual one first."""
_NESTED = "scales in 8 bits"
_MOST_STATE_BYTES = 256
"""Of what is stored as text: a type, four sizes and an offset."""


@dataclass(frozen=True, kw_only=True)
class Codebook(WeightFormat):
    """Codes, scales, the codebook, and a text that says how they make a weight."""

    kind: Literal["nf4", "fp4"]
    block: int = _BLOCK
    """Numbers that share a scale."""
    nested_block: int | None = None
    """Scales that share one of their own, where they are of eight bits."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"bitsandbytes {self.kind}"

    @property
    def measured_as(self) -> str:
        """Scales of eight bits become numbers first."""
        return self.name if self.nested_block is None else f"{self.name}, {_NESTED}"

    @property
    def variants(self) -> tuple[WeightFormat, ...]:
        """Scales are numbers, or codes."""
        return (self, replace(self, nested_block=_NESTED_BLOCK))

    def fill(self, parts: Sequence[Tensor]) -> None:
        super().fill(parts)
        state = {"blocksize": self.block, "dtype": "bfloat16"}
        if self.nested_block is not None:
            state |= {"nested_blocksize": self.nested_block, "nested_offset": 0.5}
        text = json.dumps(state).ljust(_MOST_STATE_BYTES)
        parts[2].copy_(parts[2].new_tensor(list(text.encode())))

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """Codes, scales, codebook, those of the scales, and the text."""
        *stack, rows, columns = shape
        blocks = -(-rows * columns // self.block)

        def beside(suffix: str, dtype: str, *size: int) -> StoredPart:
            return StoredPart(f"{name}.{suffix}", dtype, (*stack, *size))

        scales: tuple[StoredPart, ...] = (beside("absmax", "F32", blocks),)
        if self.nested_block is not None:
            nested = beside("nested_absmax", "F32", -(-blocks // self.nested_block))
            scales = (
                beside("absmax", "U8", blocks),
                nested,
                beside("nested_quant_map", "F32", 256),
            )
        return (
            StoredPart(name, "U8", (*stack, -(-rows * columns // 2), 1)),
            beside("quant_map", "F32", 16),
            StoredPart(self._state(name), "U8", (*stack, _MOST_STATE_BYTES), is_text=True),
            *scales,
        )

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Rounded to the numbers that the weight was made of, as upstream does."""
        from moebatch.formats import decoding

        rows = self.coded(parts, (out.shape[0], out.shape[1]))
        if rows:
            decoding.decode(rows, out)
        else:
            decoding.decode_codebook(parts, out)

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix | None:
        """Codes as they lie, where blocks end with rows."""
        from moebatch.formats import decoding

        return decoding.rows_of_codebook(parts, shape)

    def is_viewed(self, shape: tuple[int, ...]) -> bool:
        """Where blocks end with rows, and scales are numbers."""
        return self.nested_block is None and shape[-1] % self.block == 0

    def heights(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Blocks run over the ends of rows."""
        return ()

    def found(self, name: str, shape: tuple[int, ...], look: Look) -> WeightFormat | None:
        """By the text's name, and the number of scales."""
        scales, nested = look(f"{name}.absmax"), look(f"{name}.nested_absmax")
        if len(shape) > 2 or not scales or not look(self._state(name)):
            return None
        is_nested = scales.dtype == "U8"
        return replace(
            self,
            block=_block(prod(shape), scales, _BLOCK),
            nested_block=_block(prod(scales.shape), nested, _NESTED_BLOCK) if is_nested else None,
        )

    def configured(self, quantization: Mapping[str, Any]) -> WeightFormat | None:
        """``bitsandbytes``, or four bits without a method as old releases say."""
        if quantization.get("quant_method", "bitsandbytes") != "bitsandbytes":
            return None
        if quantization.get("load_in_4bit") is not True:
            if "quant_method" not in quantization:
                return None
            raise ValueError("load_in_4bit: of bitsandbytes only 4 bits are read")
        if one_of(quantization, "bnb_4bit_quant_type", ("fp4", "nf4")) != self.kind:
            return None
        is_nested = one_of(quantization, "bnb_4bit_use_double_quant", (False, True))
        return replace(self, nested_block=_NESTED_BLOCK if is_nested else None)

    def _state(self, name: str) -> str:
        return f"{name}.quant_state.bitsandbytes__{self.kind}"

    def __str__(self) -> str:
        nested = f", {_NESTED}" if self.nested_block else ""
        return f"{self.name}, blocks of {self.block} numbers{nested}"


NF4 = Codebook(kind="nf4")
FP4 = Codebook(kind="fp4")


def _block(count: int, scales: StoredPart | None, usual: int) -> int:
    """The size of which so many numbers have these scales; the usual one where none fits."""
    num_scales = prod(scales.shape) if scales else 0
    sizes = (usual, *_BLOCKS)
    return next((size for size in sizes if -(-count // size) == num_scales), usual)
