"""How a checkpoint stores experts: tensors in the order in which they are read, and the matrices
that products take out of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moebatch.formats.mixed import MixedFormat
from moebatch.formats.plain import BFLOAT16, PlainFormat, TransposedFormat
from moebatch.formats.registry import FORMATS
from moebatch.formats.weight_format import Look, Matrix, StoredMatrix, StoredPart, WeightFormat
from moebatch.spec.machine.hardware import Dtype
from moebatch.spec.model.blocks import Mlp
from moebatch.spec.model.config_keys import DTYPES
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.tensor_names import ExpertLayout

if TYPE_CHECKING:
    from torch import Tensor


Find = Callable[[str, tuple[int, ...], WeightFormat | None], WeightFormat | None]
"""Says in what format a weight of that name and shape is, perhaps in the last one; None for one
that a checkpoint lacks."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A tensor of the checkpoint, or one slice of it along the first dimension."""

    name: str
    index: int | None
    num_slices: int | None = None
    """Of a tensor that has no dimension for them, [slices x rows, ...]; None where it has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """A weight of an expert: matrices, or their biases, of equal height."""

    template: str
    roles: tuple[str, ...]
    size: tuple[int, ...]
    """That of each."""
    is_interleaved: bool
    """Their rows take turns; else they lie one below the other."""
    is_transposed: bool
    """The file has their columns as rows."""

    @property
    def stored_size(self) -> tuple[int, ...]:
        """Of all of them, as the file has it."""
        height, *width = self.size
        size = (len(self.roles) * height, *width)
        return size[::-1] if self.is_transposed else size

    @property
    def _rows(self) -> Iterator[range]:
        """Those of each."""
        count, height = len(self.roles), self.size[0]
        for place in range(count):
            if self.is_interleaved:
                yield range(place, count * height, count)
            else:
                yield range(place * height, (place + 1) * height)

    def vectors(self, part: Tensor) -> Iterator[Tensor]:
        """Its biases; views."""
        for rows in self._rows:
            yield part[rows.start : rows.stop : rows.step]

    def matrices(self, stored: WeightFormat, parts: Sequence[Tensor]) -> Iterator[Matrix]:
        """Its matrices out of its parts."""
        if self.is_transposed:
            yield from self.vectors(parts[0].T)
            return
        height, width = self.size
        for rows in self._rows:
            whole = (len(self.roles) * height, width)
            taken = parts if len(self.roles) == 1 else stored.rows(parts, rows, whole)
            yield (
                taken[0] if stored.is_tiled else StoredMatrix(stored, tuple(taken), (height, width))
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExperts:
    """The layout that all experts of a checkpoint share, and the format of each."""

    format: WeightFormat
    """Where there are several, the one that takes most bytes."""
    is_stacked: bool
    is_flat: bool
    """Stacks have no dimension of their own."""
    num_experts: int
    weights: tuple[_Weight, ...]
    biases: tuple[_Weight, ...] = ()
    bias_format: WeightFormat = BFLOAT16
    """That of all of them: numbers one after the other."""
    places: tuple[Mapping[str, object], ...] = ()
    """By layer, what names may say of it, as `ModelShape.place_of` has it."""
    others: Mapping[tuple[int, int], tuple[WeightFormat, ...]] = field(default_factory=dict)
    """Formats of the weights of experts, by layer and number, that have others."""
    shares: tuple[tuple[WeightFormat, float], ...] = ()
    """Where there are several: each, with its share of the bytes of all experts."""

    @classmethod
    def of(
        cls, shape: ModelShape, stored: WeightFormat, layout: ExpertLayout | None = None
    ) -> StoredExperts:
        """Experts of that format; without a layout one tensor for each matrix, in the order of the
        roles."""
        sizes = shape.expert.tensors(shape.expert_size)
        layout = layout or _separate(shape.expert)

        def weights(named: Mapping[str, tuple[str, ...]]) -> tuple[_Weight, ...]:
            return tuple(
                _Weight(
                    template=template,
                    roles=roles,
                    size=sizes[roles[0]],
                    is_interleaved=layout.is_interleaved,
                    is_transposed=roles[0] in layout.transposed,
                )
                for template, roles in named.items()
                if roles[0] in sizes
            )

        return cls(
            format=stored,
            is_stacked=layout.is_stacked,
            is_flat=layout.is_flat,
            num_experts=shape.num_experts,
            weights=weights(layout.weights),
            biases=weights(layout.biases),
            bias_format=FORMATS[shape.dtype],
            places=tuple(map(shape.place_of, range(shape.num_layers))),
        )

    @classmethod
    def found(
        cls, shape: ModelShape, layouts: Sequence[ExpertLayout], find: Find, look: Look
    ) -> StoredExperts:
        """The layout and format that the first expert is found in, of several with the same names
        that whose sizes fit; where there is none, the one of which most is there.

        Of formats that differ in what a small weight leaves open, it is that which fits most."""
        named: list[tuple[float, StoredExperts]] = []
        for layout in layouts:
            experts = cls.of(shape, shape.expert_format, layout)
            roles = {role for weight in experts.weights for role in weight.roles}
            if not roles >= {*shape.expert.roles}:
                continue  # has them beside gates, of which the model has none
            first = shape.moe_layers[0]
            weights = list(experts.named_weights(first, 0))
            found = [find(*weight, shape.expert_format) for weight in weights]
            stored = [each for each in found if each is not None and layout.takes(each)]
            if stored:
                best = max(stored, key=lambda each: _num_fitting(each, weights, look))
                biases = (find(*bias, None) for bias in experts.named_biases(first, 0))
                plain = next((each for each in biases if each), experts.bias_format)
                experts = replace(cls.of(shape, best, layout), bias_format=plain)
                if _num_fitting(best, weights, look) == len(weights):
                    return experts
            named.append((len(stored) / len(weights), experts))
        return max(named, key=lambda each: each[0])[1]

    def with_formats(
        self, formats: Mapping[tuple[int, int], tuple[WeightFormat, ...]]
    ) -> StoredExperts:
        """The same where the weights of experts, by layer and number, have the formats given."""
        size, num_bytes = self.weights[0].stored_size, Counter[WeightFormat]()
        for of_expert in formats.values():
            for weight, stored in zip(self.weights, of_expert, strict=True):
                num_bytes[stored] += stored.num_bytes(weight.stored_size)
        if len(num_bytes) <= 1:
            return replace(self, format=next(iter(num_bytes), self.format))
        widest = max(num_bytes, key=lambda each: (each.num_bytes(size), str(each)))
        others = {key: each for key, each in formats.items() if {*each} != {widest}}
        shares = ((each, count / num_bytes.total()) for each, count in num_bytes.items())
        return replace(self, format=widest, others=others, shares=tuple(shares))

    @property
    def spared_bytes(self) -> tuple[int, ...]:
        """By how much those experts that have other formats are smaller than in the widest."""
        sizes = [weight.stored_size for weight in self.weights]
        widest = sum(map(self.format.num_bytes, sizes))
        return tuple(
            widest - sum(stored.num_bytes(size) for stored, size in zip(each, sizes, strict=True))
            for each in self.others.values()
        )

    @property
    def bias_bytes(self) -> int:
        """Of all biases of an expert."""
        return sum(self.bias_format.num_bytes(bias.stored_size) for bias in self.biases)

    @property
    def taken_as(self) -> WeightFormat:
        """The format as products meet it: one of several, or of matrices that lie transposed."""
        if self.shares:
            return MixedFormat(widest=self.format, mix=self.shares)
        if not self.lies_across:
            return self.format
        assert isinstance(self.format, PlainFormat), "only numbers are read across rows"
        return TransposedFormat(self.format.name, self.format.dtype)

    @property
    def lies_across(self) -> bool:
        """Whether columns of some matrices are rows of the file: they can only be plain numbers."""
        return any(weight.is_transposed for weight in self.weights)

    def formats_of(self, layer: int, expert: int) -> tuple[WeightFormat, ...]:
        """Of the weights of one expert."""
        return self.others.get((layer, expert)) or (self.format,) * len(self.weights)

    def compute_dtype(self, shape: ModelShape) -> Dtype:
        """That in which products take experts as they are stored, else the one declared."""
        own = (dtype for dtype in DTYPES if self.format.is_computed_in(dtype))
        return next(own, shape.dtype)

    def named_weights(self, layer: int, expert: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and size of the weights in which the matrices of an expert lie, others beside it
        included."""
        return self._named(self.weights, layer, expert)

    def named_biases(self, layer: int, expert: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The same of its biases."""
        return self._named(self.biases, layer, expert)

    def _named(
        self, weights: Iterable[_Weight], layer: int, expert: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        for weight in weights:
            yield self._name(weight, layer, expert), self._whole_size(weight)

    def _name(self, weight: _Weight, layer: int, expert: int) -> str:
        return weight.template.format(**self.places[layer], expert=expert)

    def _whole_size(self, weight: _Weight) -> tuple[int, ...]:
        """With others beside it."""
        if not self.is_stacked:
            return weight.stored_size
        if not self.is_flat:
            return (self.num_experts, *weight.stored_size)
        height, *width = weight.stored_size
        return (self.num_experts * height, *width)

    def parts(self, layer: int, expert: int) -> Iterator[StoredPart]:
        """The tensors of a file in which an expert lies, others beside it included."""
        formats = self.formats_of(layer, expert)
        for stored, (name, size) in zip(formats, self.named_weights(layer, expert), strict=True):
            yield from stored.parts(name, size)
        for name, size in self.named_biases(layer, expert):
            yield from self.bias_format.parts(name, size)

    def pieces(self, layer: int, expert: int) -> tuple[StoredPiece, ...]:
        """What is read of an expert, in the order that `matrices` expects."""
        index = expert if self.is_stacked else None
        num_slices = self.num_experts if self.is_flat else None
        parts = self.parts(layer, expert)
        return tuple(StoredPiece(part.name, index, num_slices) for part in parts)

    def weights_of(
        self, layer: int, expert: int
    ) -> Iterator[tuple[str, WeightFormat, tuple[int, ...]]]:
        """Name, format and size of its weights, its biases last, without others beside it."""
        formats = (*self.formats_of(layer, expert), *[self.bias_format] * len(self.biases))
        for stored, weight in zip(formats, (*self.weights, *self.biases), strict=True):
            yield self._name(weight, layer, expert), stored, weight.stored_size

    def matrices(
        self, tensors: Sequence[Tensor], layer: int = 0, expert: int = 0
    ) -> dict[str, Matrix]:
        """The matrices and biases of an expert by role, out of what was read; views, nothing is
        copied."""
        found: dict[str, Matrix] = {}
        start = 0
        for weight, stored in zip(self.weights, self.formats_of(layer, expert), strict=True):
            parts = tensors[start : start + len(stored.parts("", weight.stored_size))]
            start += len(parts)
            found.update(zip(weight.roles, weight.matrices(stored, parts), strict=True))
        for bias, part in zip(self.biases, tensors[start:], strict=True):
            found.update(zip(bias.roles, bias.vectors(part), strict=True))
        return found


def _separate(expert: Mlp) -> ExpertLayout:
    """A tensor for each matrix, and for each bias."""
    biases = {f"{role}_bias": (f"{role}_bias",) for role in expert.roles if expert.bias}
    return ExpertLayout(weights={role: (role,) for role in expert.roles}, biases=biases)


def _num_fitting(
    stored: WeightFormat, weights: Iterable[tuple[str, tuple[int, ...]]], look: Look
) -> int:
    return sum(stored.fits(name, size, look) for name, size in weights)
