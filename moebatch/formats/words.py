"""Whole numbers in words, inputs above outputs: GPTQ (four and eight bits) and AWQ (four).

Scales and zero points [G, O] are those of groups of inputs; in GPTQ, ``g_idx`` says of which group
an input is, in whatever order.

Shape letters: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moebatch.formats.blocks import Blocks, columns_of
from moebatch.formats.coded import WORD_BITS, words_of
from moebatch.formats.quantization import one_of, size_of
from moebatch.formats.weight_format import CodedFormat, Look, StoredPart, WeightFormat, beside

if TYPE_CHECKING:
    from torch import Tensor

    from moebatch.formats.coded import CodedMatrix

_SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True, kw_only=True)
class Words(CodedFormat):
    """Codes, zero points and scales."""

    has_zero_points = True
    name: str
    bits: int
    group: int = 128
    """Inputs that share a scale."""
    scale_dtype: str = "F16"
    packs_inputs: bool
    """Words hold codes of neighbouring inputs, as GPTQ's do; AWQ's hold those of outputs."""
    has_order: bool = False
    """Inputs are of groups that ``g_idx`` names."""
    is_ordered: bool = False
    """``config.json`` says that groups are not those of neighbours; `has_order` alone leaves it to
    the contents."""
    is_second: bool = False
    """GPTQ's second version, which stores zero points as they are and not less one. Where they are
    symmetric, they show which they are, whatever the checkpoint says."""

    @property
    def measured_as(self) -> str:
        """Scales of an order are looked up one by one."""
        return f"{self.name}, ordered" if self.is_ordered else self.name

    @property
    def variants(self) -> tuple[WeightFormat, ...]:
        """With neighbours in groups, and with an order."""
        ordered = replace(self, has_order=True, is_ordered=True)
        return (self, ordered) if self.packs_inputs else (self,)

    def fill(self, parts: Sequence[Tensor]) -> None:
        super().fill(parts)
        if self.has_order:
            parts[-1].zero_()

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """Codes, zero points, scales and, in GPTQ, groups of inputs."""
        *stack, rows, columns = shape
        groups = Blocks(1, self.group).grid((1, columns))[-1]
        across, down = words_of(rows, self.bits), words_of(columns, self.bits)
        size = (down, rows) if self.packs_inputs else (columns, across)
        found = (
            StoredPart(beside(name, ".qweight"), "I32", (*stack, *size)),
            StoredPart(beside(name, ".qzeros"), "I32", (*stack, groups, across)),
            StoredPart(beside(name, ".scales"), self.scale_dtype, (*stack, groups, rows)),
        )
        if not self.has_order:
            return found
        return *found, StoredPart(beside(name, ".g_idx"), "I32", (*stack, columns))

    def is_viewed(self, shape: tuple[int, ...]) -> bool:
        """Never: codes lie across."""
        return False

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix:
        """Words where they lie. Rounded to the numbers of the scales, as upstream does."""
        from moebatch.formats import decoding

        return decoding.words_matrix(
            parts,
            shape,
            bits=self.bits,
            group=Blocks(1, self.group).size(shape)[1],
            lies="words of inputs" if self.packs_inputs else "words of outputs",
            added=self.packs_inputs and not self.is_second,
        )

    def heights(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Rows are columns here and cannot be read apart."""
        return ()

    def widths(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Columns lie in rows; where they have an order, any group may be that of a column."""
        codes = WORD_BITS // self.bits if self.packs_inputs else 1
        group = 0 if self.has_order else Blocks(1, self.group).size(shape)[1]
        return (codes, group, group, 1)[: len(self.parts("", shape))]

    def found(self, name: str, shape: tuple[int, ...], look: Look) -> WeightFormat | None:
        """By its codes' size; two formats and numbers of bits differ in it."""
        codes, scales = look(beside(name, ".qweight")), look(beside(name, ".scales"))
        if not (codes and scales) or scales.dtype not in _SCALE_DTYPES:
            return None
        order = look(beside(name, ".g_idx"))
        group = columns_of(shape[-1], *scales.shape[-2:-1])
        found = replace(
            self,
            group=self.group if group is None else group,
            scale_dtype=scales.dtype,
            has_order=self.packs_inputs and order is not None,
            is_ordered=self.is_ordered and order is not None,
        )
        return found if found.parts(name, shape)[0] == codes else None

    def configured(self, quantization: Mapping[str, Any]) -> WeightFormat | None:
        """By the method of this name, or by auto-round's that packs so."""
        method = quantization.get("quant_method")
        if method == "auto-round":
            packing = str(quantization.get("packing_format")).removeprefix("auto_round:auto_")
            method = packing.removeprefix("auto_round:")
        if method != self.quant_method or one_of(quantization, "bits", (4, 8)) != self.bits:
            return None
        group = size_of(quantization, "group_size", 128)
        if not self.packs_inputs:
            one_of(quantization, "version", ("gemm", "GEMM"))
            return replace(self, group=group)
        key = "checkpoint_format" if "checkpoint_format" in quantization else "format"
        kind = one_of(quantization, key, ("gptq", "gptq_v2", "gptq_p"))
        is_ordered = quantization.get("desc_act") is True
        return replace(
            self, group=group, has_order=True, is_ordered=is_ordered, is_second=kind != "gptq"
        )

    @property
    def quant_method(self) -> str:  # type: ignore[override]
        return self.name.split()[0]

    def __str__(self) -> str:
        order = ", in an order of its own" if self.has_order else ""
        return f"{self.name}, {Blocks(1, self.group)}{order}"


GPTQ = Words(name="gptq int4", bits=4, packs_inputs=True)
GPTQ_INT8 = Words(name="gptq int8", bits=8, packs_inputs=True)
AWQ = Words(name="awq int4", bits=4, packs_inputs=False)
