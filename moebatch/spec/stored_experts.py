"""How a checkpoint stores experts: tensors in the order in which they are read, and the matrices
that products take out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moebatch.formats.weight_format import Look, Matrix, StoredMatrix, StoredPart, WeightFormat
from moebatch.spec.config_keys import DTYPES
from moebatch.spec.hardware import Dtype
from moebatch.spec.shape import ModelShape
from moebatch.spec.tensor_names import ExpertLayout

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


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight of an expert: matrices one below the other."""

    template: str
    roles: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    """Those of the matrices."""

    @property
    def size(self) -> tuple[int, int]:
        return sum(size[0] for size in self.sizes), self.sizes[0][1]

    def matrices(self, stored: WeightFormat, parts: Sequence[Tensor]) -> Iterator[Matrix]:
        """Its matrices out of its parts."""
        start = 0
        for size in self.sizes:
            rows, start = range(start, start + size[0]), start + size[0]
            taken = parts if len(self.sizes) == 1 else stored.rows(parts, rows, self.size)
            yield taken[0] if stored.is_tiled else StoredMatrix(stored, tuple(taken), size)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExperts:
    """The layout that all experts of a checkpoint share, and the format of each."""

    format: WeightFormat
    """Where there are several, the one that takes most bytes."""
    is_stacked: bool
    num_experts: int
    weights: tuple[_Weight, ...]
    others: Mapping[tuple[int, int], tuple[WeightFormat, ...]] = field(default_factory=dict)
    """Formats of the weights of experts, by layer and number, that have others."""

    @classmethod
    def of(
        cls, shape: ModelShape, stored: WeightFormat, layout: ExpertLayout | None = None
    ) -> StoredExperts:
        """Experts of that format; without a layout one tensor for each matrix, in the order of the
        roles."""
        sizes = shape.expert.matrices(shape.hidden_size)
        layout = layout or ExpertLayout(weights={role: (role,) for role in sizes})
        return cls(
            format=stored,
            is_stacked=layout.is_stacked,
            num_experts=shape.num_experts,
            weights=tuple(
                _Weight(template, roles, tuple((sizes[role][0], sizes[role][1]) for role in roles))
                for template, roles in layout.weights.items()
            ),
        )

    @classmethod
    def found(
        cls, shape: ModelShape, layouts: Sequence[ExpertLayout], find: Find, look: Look
    ) -> StoredExperts:
        """The layout and format that the first expert is found in; where there is none, the first
        layout, in which it is then missed.

        Of formats that differ in what a small weight leaves open, it is that which fits most."""
        for layout in layouts:
            experts = cls.of(shape, shape.expert_format, layout)
            weights = list(experts.named_weights(shape.moe_layers[0], 0))
            found = [find(*weight, shape.expert_format) for weight in weights]
            stored = [each for each in found if each is not None]
            if stored:
                best = max(stored, key=lambda each: _num_fitting(each, weights, look))
                return cls.of(shape, best, layout)
        return cls.of(shape, shape.expert_format, layouts[0])

    def with_formats(
        self, formats: Mapping[tuple[int, int], tuple[WeightFormat, ...]]
    ) -> StoredExperts:
        """The same where the weights of experts, by layer and number, have the formats given."""
        size = self.weights[0].size
        known = {each for of_expert in formats.values() for each in of_expert} or {self.format}
        widest = max(known, key=lambda each: (each.num_bytes(size), str(each)))
        others = {key: each for key, each in formats.items() if {*each} != {widest}}
        return replace(self, format=widest, others=others)

    @property
    def spared_bytes(self) -> int:
        """By how much all experts together are smaller than if all had the widest format."""
        return sum(
            self.format.num_bytes(weight.size) - stored.num_bytes(weight.size)
            for formats in self.others.values()
            for weight, stored in zip(self.weights, formats, strict=True)
        )

    def formats_of(self, layer: int, expert: int) -> tuple[WeightFormat, ...]:
        """Of the weights of one expert."""
        return self.others.get((layer, expert)) or (self.format,) * len(self.weights)

    def compute_dtype(self, shape: ModelShape) -> Dtype:
        """That in which products take experts as they are stored, else the one declared."""
        own = (dtype for dtype in DTYPES if self.format.is_computed_in(dtype))
        return next(own, shape.dtype)

    def named_weights(self, layer: int, expert: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and size of the weights in which an expert lies, others beside it included."""
        stacked = (self.num_experts,) if self.is_stacked else ()
        for weight in self.weights:
            yield weight.template.format(layer=layer, expert=expert), (*stacked, *weight.size)

    def parts(self, layer: int, expert: int) -> Iterator[StoredPart]:
        """The tensors of a file in which an expert lies, others beside it included."""
        formats = self.formats_of(layer, expert)
        for stored, (name, size) in zip(formats, self.named_weights(layer, expert), strict=True):
            yield from stored.parts(name, size)

    def pieces(self, layer: int, expert: int) -> tuple[StoredPiece, ...]:
        """What is read of an expert, in the order that `matrices` expects."""
        index = expert if self.is_stacked else None
        return tuple(StoredPiece(part.name, index) for part in self.parts(layer, expert))

    def matrices(
        self, tensors: Sequence[Tensor], layer: int = 0, expert: int = 0
    ) -> dict[str, Matrix]:
        """The matrices of an expert by role, out of what was read; views, nothing is copied."""
        found: dict[str, Matrix] = {}
        start = 0
        for weight, stored in zip(self.weights, self.formats_of(layer, expert), strict=True):
            parts = tensors[start : start + len(stored.parts("", weight.size))]
            start += len(parts)
            found.update(zip(weight.roles, weight.matrices(stored, parts), strict=True))
        return found


def _num_fitting(
    stored: WeightFormat, weights: Iterable[tuple[str, tuple[int, ...]]], look: Look
) -> int:
    return sum(stored.fits(name, size, look) for name, size in weights)
