"""Eight bits a number, and a scale for each block of them: FP8, MXFP8 and whole numbers of a byte.

FP8 as DeepSeek, Qwen, MiniMax and GLM release it (``weight_scale_inv``, which multiplies in spite
of its name), per tensor and per channel; compressed-tensors' ``float-quantized``,
``mxfp8-quantized`` and ``int-quantized``; FBGEMM's and modelopt's FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moebatch.formats.blocks import WHOLE, Blocks
from moebatch.formats.coded import CodedMatrix, Numbers
from moebatch.formats.quantization import Scheme, blocks_of, one_of
from moebatch.formats.weight_format import CodedFormat, Look, StoredPart, WeightFormat, beside

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = ("_scale_inv", "_scale", ".scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_LAYOUTS = ("float-quantized", "int-quantized", "naive-quantized")
"""What compressed-tensors calls these."""
_WHOLE = Blocks(WHOLE, WHOLE)
_SQUARES = Blocks(128, 128)


@dataclass(frozen=True, kw_only=True)
class ScaledBytes(CodedFormat):
    """One tensor of the weight's name and shape, and one of scales."""

    name: str
    numbers: Numbers
    dtype: str
    suffix: str = "_scale_inv"
    """What the scales are called after the weight."""
    scale_dtype: str = "F32"
    blocks: Blocks = _SQUARES
    scalar_shape: tuple[int, ...] | None = None
    """Of the only scale of a matrix, where it is no grid of one block."""

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        grid = self.blocks.grid(shape)
        if self.scalar_shape is not None:
            grid = (*shape[:-2], *self.scalar_shape)
        scales = StoredPart(beside(name, self.suffix), self.scale_dtype, grid)
        return StoredPart(name, self.dtype, shape), scales

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix:
        """Codes as they lie. Where they are compressed-tensors', weights are rounded to the numbers
        of the scales, as it does."""
        from moebatch.formats.decoding import BYTES, ROUNDED_TO

        codes, scales = parts
        rows, columns = self.blocks.size(shape)
        scales = scales.view(1, 1) if self.scalar_shape is not None else scales
        return CodedMatrix(
            numbers=self.numbers,
            codes=codes.view(BYTES),
            scales=scales,
            block=(1 if len(scales) == shape[0] else rows, columns),
            shape=shape,
            rounds_to=ROUNDED_TO.get(self.scale_dtype) if self.suffix == "_scale" else None,
        )

    def heights(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Scales are those of as many rows as a block has."""
        return 1, 0 if self.scalar_shape is not None else self.blocks.rows

    def rows(
        self, parts: Sequence[Tensor], taken: range, shape: tuple[int, int]
    ) -> Sequence[Tensor]:
        """Where a cut goes through blocks, each row gets scales of its own."""
        codes, scales = parts
        height = self.heights(shape)[1]
        if not height or (taken.start % height == 0 and taken.step == 1):
            return super().rows(parts, taken, shape)
        of_rows = scales.repeat_interleave(height, 0)
        chosen = slice(taken.start, taken.stop, taken.step)
        return codes[chosen], of_rows[chosen]

    def found(self, name: str, shape: tuple[int, ...], look: Look) -> WeightFormat | None:
        """By the scales beside the weight, without zero points."""
        codes = look(name)
        if codes is None or codes.dtype != self.dtype or codes.shape != shape:
            return None
        if look(f"{name}_zero_point"):
            return None
        for suffix in _SUFFIXES:
            scales = look(beside(name, suffix))
            if scales is not None and scales.dtype in _SCALE_DTYPES:
                return self._with(suffix, scales, shape)
        return None

    def _with(self, suffix: str, scales: StoredPart, shape: tuple[int, ...]) -> ScaledBytes:
        named = replace(self, suffix=suffix, scale_dtype=scales.dtype)
        own = scales.shape[len(shape) - 2 :]
        if own in ((), (1,)):
            return replace(named, blocks=_WHOLE, scalar_shape=own)
        blocks = Blocks.found(shape, scales.shape)
        return replace(named, blocks=blocks) if blocks else named

    def configured(self, quantization: Mapping[str, Any]) -> WeightFormat | None:
        scheme = Scheme.of(quantization)
        if scheme is not None:
            return self._compressed(scheme)
        return self._named(quantization) if self.numbers == "e4m3" else None

    def _compressed(self, scheme: Scheme) -> WeightFormat | None:
        if (scheme.bits, scheme.is_float) != (8, self.numbers == "e4m3"):
            return None
        if scheme.layout == "mxfp8-quantized":
            return replace(self, suffix="_scale", scale_dtype="U8", blocks=Blocks(1, 32))
        if scheme.layout not in _LAYOUTS:
            return None
        if not scheme.is_symmetric:
            raise ValueError("symmetric: zero points beside whole bytes are not read")
        scalar = (1,) if scheme.blocks == _WHOLE else None
        return replace(
            self, suffix="_scale", scale_dtype="BF16", blocks=scheme.blocks, scalar_shape=scalar
        )

    def _named(self, quantization: Mapping[str, Any]) -> WeightFormat | None:
        method = quantization.get("quant_method")
        if method == "fp8":
            return self._fp8(quantization)
        if method == "mxfp8":
            return replace(self, scale_dtype="U8", blocks=Blocks(1, 32))
        if method == "fbgemm_fp8":
            return replace(self, suffix="_scale", blocks=Blocks(1, WHOLE))
        if method == "modelopt" and quantization.get("quant_algo") == "FP8":
            return replace(self, suffix="_scale", blocks=_WHOLE, scalar_shape=())
        return None

    def _fp8(self, quantization: Mapping[str, Any]) -> WeightFormat:
        has_powers = one_of(quantization, "scale_fmt", ("float", "ue8m0", None)) == "ue8m0"
        blocks = blocks_of(quantization, "weight_block_size", _SQUARES)
        return replace(
            self,
            scale_dtype="F8_E8M0" if has_powers else "F32",
            blocks=blocks,
            scalar_shape=() if blocks == _WHOLE else None,
        )

    def __str__(self) -> str:
        return f"{self.name}, {self.blocks}"


FP8 = ScaledBytes(name="fp8", numbers="e4m3", dtype="F8_E4M3")
INT8 = ScaledBytes(
    name="int8", numbers="int8", dtype="I8", suffix="_scale", blocks=Blocks(1, WHOLE)
)
