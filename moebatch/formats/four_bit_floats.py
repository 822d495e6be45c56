"""Floats of four bits (e2m1), two a byte, and a scale for each group: MXFP4 and NVFP4.

MXFP4 (groups of 32, scales that are powers of two) as gpt-oss, DeepSeek-V4 and compressed-tensors
name it; NVFP4 (groups of 16, scales in FP8, and one for the whole matrix) as compressed-tensors,
which divides by the latter, and modelopt, which multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moebatch.formats.blocks import Blocks
from moebatch.formats.coded import CodedMatrix
from moebatch.formats.quantization import Scheme
from moebatch.formats.weight_format import CodedFormat, Look, StoredPart, WeightFormat, beside

if TYPE_CHECKING:
    from torch import Tensor

_OF_ONE = ((), (1,))
"""Shapes of a single number."""


@dataclass(frozen=True, kw_only=True)
class FourBitFloats(CodedFormat):
    """One dialect: what its tensors are called, and what they are."""

    name: str
    described_by: str
    """The ``quant_method``, the ``format`` of compressed-tensors or the ``quant_algo`` of modelopt
    that says so."""
    group: int
    codes_suffix: str
    codes_dtype: str = "U8"
    scale_suffix: str
    scale_dtypes: tuple[str, ...]
    """The first one is the usual one; they differ in name only."""
    has_blocks: bool = False
    """The bytes of a group have a dimension of their own."""
    global_suffix: str | None = None
    """Of the scale of the whole matrix."""
    global_shape: tuple[int, ...] = (1,)
    is_inverse: bool = False
    """The latter divides."""

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """Codes, scales and, in NVFP4, the scale of the whole."""
        *stack, rows, columns = shape
        groups = -(-columns // self.group)
        width = (groups, self.group // 2) if self.has_blocks else (-(-columns // 2),)
        found = (
            StoredPart(beside(name, self.codes_suffix), self.codes_dtype, (*stack, rows, *width)),
            StoredPart(
                beside(name, self.scale_suffix), self.scale_dtypes[0], (*stack, rows, groups)
            ),
        )
        if self.global_suffix is None:
            return found
        return *found, StoredPart(
            f"{name}{self.global_suffix}", "F32", (*stack, *self.global_shape)
        )

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix:
        """Bytes as they lie. compressed-tensors rounds NVFP4 to bfloat16."""
        from moebatch.formats.decoding import BYTES, E4M3, ROUNDED_TO

        codes, scales = parts[0].flatten(1).view(BYTES), parts[1]
        if self.global_suffix is not None:
            scales = scales.view(E4M3)
        return CodedMatrix(
            numbers="e2m1",
            codes=codes,
            scales=scales,
            block=(1, self.group),
            shape=shape,
            factor=parts[2] if len(parts) > 2 else None,
            divides=self.is_inverse,
            rounds_to=ROUNDED_TO["BF16"] if self.is_inverse else None,
        )

    def heights(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The scale of the whole is that of all rows."""
        return (1, 1) if self.global_suffix is None else (1, 1, 0)

    def found(self, name: str, shape: tuple[int, ...], look: Look) -> WeightFormat | None:
        """By names, and by the scales' dtype: shapes are given by the format."""
        found = list(self.parts(name, shape))
        looked = [look(part.name) for part in found]
        scales, overall = looked[1], looked[-1]
        if scales is None or scales.dtype not in self.scale_dtypes:
            return None
        this = replace(self, scale_dtypes=_first(self.scale_dtypes, scales.dtype))
        if self.global_suffix is not None and overall is not None:
            own = overall.shape[len(shape) - 2 :]
            this = replace(this, global_shape=own if own in _OF_ONE else self.global_shape)
        return this if this.fits(name, shape, look) else None

    def configured(self, quantization: Mapping[str, Any]) -> WeightFormat | None:
        scheme, method = Scheme.of(quantization), quantization.get("quant_method")
        if scheme is not None:
            said = scheme.layout
        elif method == "modelopt":
            said = f"modelopt {quantization.get('quant_algo')}".replace("W4A16_", "")
        else:
            said = f"{method} {quantization.get('expert_dtype', '')}".strip()
        return self if said == self.described_by else None

    def __str__(self) -> str:
        return f"{self.name}, {Blocks(1, self.group)}"


def _first(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return (name, *(each for each in names if each != name))


MXFP4 = FourBitFloats(
    name="mxfp4",
    described_by="mxfp4",
    group=32,
    codes_suffix="_blocks",
    scale_suffix="_scales",
    scale_dtypes=("U8", "F8_E8M0"),
    has_blocks=True,
)
PACKED_MXFP4 = replace(
    MXFP4,
    name="packed mxfp4",
    described_by="mxfp4-pack-quantized",
    codes_suffix="_packed",
    scale_suffix="_scale",
    has_blocks=False,
)
DEEPSEEK_FP4 = replace(
    MXFP4,
    name="mxfp4 of DeepSeek",
    described_by="fp8 fp4",
    codes_suffix="",
    codes_dtype="I8",
    scale_suffix=".scale",
    scale_dtypes=("F8_E8M0", "U8"),
    has_blocks=False,
)
NVFP4 = FourBitFloats(
    name="nvfp4",
    described_by="modelopt NVFP4",
    group=16,
    codes_suffix="",
    scale_suffix="_scale",
    scale_dtypes=("F8_E4M3", "U8"),
    global_suffix="_scale_2",
    global_shape=(),
)
PACKED_NVFP4 = replace(
    NVFP4,
    name="packed nvfp4",
    described_by="nvfp4-pack-quantized",
    codes_suffix="_packed",
    global_suffix="_global_scale",
    global_shape=(1,),
    is_inverse=True,
)
