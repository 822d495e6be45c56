"""Whole numbers of four or eight bits, packed into words: compressed-tensors' ``pack-quantized``,
as Kimi-K2 and W4A16 checkpoints are released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from moebatch.errors import CheckpointError
from moebatch.formats.blocks import WHOLE, Blocks, columns_of
from moebatch.formats.coded import WORD_BITS, CodedMatrix, words_of
from moebatch.formats.quantization import Scheme
from moebatch.formats.weight_format import CodedFormat, Look, StoredPart, WeightFormat
from moebatch.quoting import shown

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, kw_only=True)
class PackedIntegers(CodedFormat):
    """Words of codes along the columns, scales, and zero points packed along the rows.

    ``weight_shape`` says what the model's configuration says as well, and is not read.
    """

    has_zero_points = True
    bits: Literal[4, 8]
    group: int = WHOLE
    """Columns that share a scale."""
    scale_dtype: str = "BF16"
    is_symmetric: bool = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"packed int{self.bits}"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """Codes, scales and, where they are not symmetric, zero points."""
        *stack, rows, columns = shape
        groups = Blocks(1, self.group).grid(shape)[-1]
        packed = StoredPart(f"{name}_packed", "I32", (*stack, rows, words_of(columns, self.bits)))
        scales = StoredPart(f"{name}_scale", self.scale_dtype, (*stack, rows, groups))
        if self.is_symmetric:
            return packed, scales
        zeros = (*stack, words_of(rows, self.bits), groups)
        return packed, scales, StoredPart(f"{name}_zero_point", "I32", zeros)

    def heights(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Zero points are packed as many as fit into a word."""
        return (1, 1) if self.is_symmetric else (1, 1, WORD_BITS // self.bits)

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix:
        """Words as bytes: the first code is in the lowest bits."""
        from moebatch.formats.decoding import BYTES, ROUNDED_TO

        packed, scales = parts[:2]
        return CodedMatrix(
            numbers="int4" if self.bits == 4 else "uint8",
            codes=packed.view(BYTES),
            scales=scales,
            block=Blocks(1, self.group).size(shape),
            shape=shape,
            zeros=None if self.is_symmetric else parts[2],
            rounds_to=ROUNDED_TO.get(self.scale_dtype),
        )

    def fits(self, name: str, shape: tuple[int, ...], look: Look) -> bool:
        """Nor does the checkpoint have zero points that would be left out."""
        _refuse_order(name, look)
        zeros = look(f"{name}_zero_point")
        # Old releases store zeros beside symmetric codes, one in a byte.
        has_others = self.is_symmetric and zeros is not None and zeros.dtype == "I32"
        return not has_others and super().fits(name, shape, look)

    def found(self, name: str, shape: tuple[int, ...], look: Look) -> WeightFormat | None:
        """By the words of codes and the scales."""
        packed, scales = look(f"{name}_packed"), look(f"{name}_scale")
        if not (packed and scales and packed.dtype == "I32" and scales.dtype in _SCALE_DTYPES):
            return None
        _refuse_order(name, look)
        if packed.shape[-1:] != (words_of(shape[-1], self.bits),):
            return None
        return replace(
            self,
            group=columns_of(shape[-1], *scales.shape[-1:]) or WHOLE,
            scale_dtype=scales.dtype,
            is_symmetric=look(f"{name}_zero_point") is None,
        )

    def configured(self, quantization: Mapping[str, Any]) -> WeightFormat | None:
        scheme = Scheme.of(quantization)
        if not scheme or (scheme.layout, scheme.bits) != ("pack-quantized", self.bits):
            return None
        if scheme.blocks.rows != 1:
            raise ValueError("strategy: packed integers have a scale for each row or group")
        return replace(self, group=scheme.blocks.columns, is_symmetric=scheme.is_symmetric)

    def __str__(self) -> str:
        kind = "" if self.is_symmetric else ", with zero points"
        return f"{self.name}, {Blocks(1, self.group)}{kind}"


def _refuse_order(name: str, look: Look) -> None:
    if look(f"{name}_g_idx"):
        raise CheckpointError(
            f"{shown(name)} is quantised in an order of its own ({shown(name + '_g_idx')}), "
            "which compressed-tensors reads no more either; quantise the model without actorder"
        )


PACKED_INT4 = PackedIntegers(bits=4)
PACKED_INT8 = PackedIntegers(bits=8)
