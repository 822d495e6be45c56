"""What a format of stored weights says: the tensors on disk, their bytes, the matrix they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from moebatch.formats.coded import CodedMatrix

DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of a number, by the names that safetensors files use."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a file that holds a weight, or a part of it."""

    name: str
    dtype: str
    """In safetensors' spelling, such as ``BF16``."""
    shape: tuple[int, ...]
    is_text: bool = False
    """Its length may be any up to the one that the shape says."""

    @property
    def num_bytes(self) -> int:
        return ceil(prod(self.shape) * DTYPE_BITS[self.dtype] / 8)

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        if not self.is_text:
            return shape == self.shape
        *stack, length = shape or (0,)
        return (*stack,) == self.shape[:-1] and 0 < length <= self.shape[-1]


Look = Callable[[str], StoredPart | None]
"""Says of what dtype and shape a tensor of a checkpoint is, None for one that it lacks."""


class WeightFormat(ABC):
    """A way in which checkpoints store a weight of a given name and shape [..., rows, columns].

    Every part has the leading sizes of the weight, so that stacked experts can be read one by one.
    Formats that are equal store weights of one shape in the same bytes; one that has parameters,
    such as the size of its groups, is a frozen dataclass, and the one that is registered stands for
    all of them.
    """

    name: str
    """As messages and measurements name it, whatever its parameters."""
    quant_method: str | None = None
    """By which ``quantization_config`` in ``config.json`` names it."""
    is_tiled = False
    """Products read the stored numbers tile by tile, where the program's own kernels multiply;
    otherwise the whole matrix is decoded before each product."""
    is_coded = False
    """`coded` answers for every weight, so that the program's own kernels decode without room."""
    has_zero_points = False
    """Codes are whole numbers above a zero point, be it one for all of them."""

    def __str__(self) -> str:
        """As messages describe it, with its parameters."""
        return self.name

    @property
    def measured_as(self) -> str:
        """As profiles name it where they say how fast it is decoded."""
        return self.name

    @property
    def variants(self) -> tuple[WeightFormat, ...]:
        """Those of this name that are measured by themselves."""
        return (self,)

    def fill(self, parts: Sequence[Tensor]) -> None:
        """Makes a weight of `parts` (uint8), so that decoding is measured without a checkpoint:
        small numbers in every type, which are not subnormal."""
        for part in parts:
            part.fill_(0x11)

    @property
    def shares(self) -> tuple[tuple[WeightFormat, float], ...]:
        """The formats for which this one stands, with their shares of the bytes: itself alone."""
        return ((self, 1.0),)

    @abstractmethod
    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """The tensors of a file that hold the weight `name`."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Writes the weight that `parts` hold into `out` [rows, columns], which has the dtype in
        which products are computed. Raises BadParts where their contents make no sense."""

    def heights(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of each part of a weight of that shape: how many of the weight's rows share one of its
        rows, 0 where all of it belongs to all of them. Empty where rows cannot be taken apart."""
        return (1,) * len(self.parts("", shape))

    def widths(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of each part: how many of the weight's columns share one of the part's rows, 0 where all
        of it belongs to all of them. Empty where columns cannot be taken apart."""
        return ()

    def rows(
        self, parts: Sequence[Tensor], taken: range, shape: tuple[int, int]
    ) -> Sequence[Tensor]:
        """What `parts` hold of some rows of a weight, every n-th if there is a step. Raises
        BadParts where a row of a part would have to be cut through."""
        heights = self.heights(shape)
        if not heights or any(height and taken.start % height for height in heights):
            raise BadParts(f"{self} cannot be cut at row {taken.start}")
        if taken.step > 1 and max(heights) > 1:
            raise BadParts(f"{self} shares scales among rows of different matrices")
        shares = [share(taken, height) for height in heights]
        return [
            part[rows.start : rows.stop : taken.step] if rows else part
            for part, rows in zip(parts, shares, strict=True)
        ]

    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix | None:
        """The matrix that `parts` hold as the compiled kernels read it, None where only `decode`
        knows how. Both give the same numbers, bit for bit."""
        return None

    def is_viewed(self, shape: tuple[int, ...]) -> bool:
        """Whether `coded` answers for all weights of that shape with codes in rows and scales as
        they are stored: a GPU's kernels then decode what lies in its memory as it lies there."""
        return False

    def is_computed_in(self, dtype: str) -> bool:
        """Whether products in ``float32``, ``bfloat16`` or ``float16`` take it as it is stored."""
        return False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return sum(part.num_bytes for part in self.parts("", shape))

    def configured(self, quantization: Mapping[str, Any]) -> WeightFormat | None:
        """The format, with its parameters, that a ``quantization_config`` describes, None where
        that describes another one. Raises ValueError for values that make no sense."""
        is_named = self.quant_method is not None
        return self if is_named and quantization.get("quant_method") == self.quant_method else None

    def fits(self, name: str, shape: tuple[int, ...], look: Look) -> bool:
        """Whether a checkpoint has just the tensors that this format wants."""
        parts = self.parts(name, shape)
        return has_dtypes(parts, look) and all(
            (found := look(part.name)) and part.has_shape(found.shape) for part in parts
        )

    def found(self, name: str, shape: tuple[int, ...], look: Look) -> WeightFormat | None:
        """The format, with the parameters that its tensors show, in which a checkpoint stores the
        weight `name`; None where it does not store it so. Shapes that fit no parameters are left to
        be found by who compares them with those of `parts`."""
        return self if has_dtypes(self.parts(name, shape), look) else None


class CodedFormat(WeightFormat):
    """One of codes and scales, of which `coded` says everything."""

    is_coded = True

    def is_viewed(self, shape: tuple[int, ...]) -> bool:
        return True

    @abstractmethod
    def coded(self, parts: Sequence[Tensor], shape: tuple[int, int]) -> CodedMatrix:
        """The codes as they lie. Raises BadParts where the contents of parts make no sense."""

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """In torch, with room for a part of the rows at a time."""
        from moebatch.formats import decoding

        decoding.decode(self.coded(parts, (out.shape[0], out.shape[1])), out)


class BadParts(ValueError):
    """The contents of a stored weight make no sense."""


def beside(name: str, suffix: str) -> str:
    """The name of a tensor beside a weight: the weight's with a suffix, or one with a dot in the
    place of its last word."""
    return name.removesuffix(".weight") + suffix if suffix.startswith(".") else name + suffix


def has_dtypes(parts: Iterable[StoredPart], look: Look) -> bool:
    return all((found := look(part.name)) and found.dtype == part.dtype for part in parts)


def share(rows: range, height: int) -> range:
    """The rows of a part, each of so many of the weight's, that hold some of the weight's; empty
    where the height is 0."""
    return range(rows.start // height, -(-rows.stop // height)) if height else range(0)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix in a format of which products need a decoded copy."""

    format: WeightFormat
    parts: tuple[Tensor, ...]
    shape: tuple[int, int]


Matrix: TypeAlias = "Tensor | StoredMatrix"
"""A matrix as products take it: numbers that they read themselves, or what has to be decoded."""
