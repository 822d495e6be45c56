"""How a checkpoint stores experts: tensors in the order in which they are read, and the matrices
that products take out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moebatch.formats.registry import find_format
from moebatch.formats.weight_format import Matrix, StoredMatrix, StoredPart, WeightFormat
from moebatch.spec.config_keys import DTYPES
from moebatch.spec.hardware import Dtype
from moebatch.spec.shape import ModelShape
from moebatch.spec.tensor_names import ExpertLayout, TensorNames

if TYPE_CHECKING:
    from torch import Tensor

DtypeOf = Callable[[str], str | None]
"""Says of what dtype a tensor of the checkpoint is, None for one that it lacks."""


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
    sizes: tuple[tuple[int, ...], ...]
    """Those of the matrices."""

    @property
    def size(self) -> tuple[int, ...]:
        return (sum(size[0] for size in self.sizes), *self.sizes[0][1:])

    def apart(self, part: Tensor) -> Sequence[Tensor]:
        """What a part of it holds of each matrix."""
        return part.chunk(len(self.roles)) if len(self.roles) > 1 else (part,)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredExperts:
    """The layout and the format of all experts of a checkpoint, which share both."""

    format: WeightFormat
    is_stacked: bool
    num_experts: int
    weights: tuple[_Weight, ...]

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
                _Weight(template, roles, tuple(sizes[role] for role in roles))
                for template, roles in layout.weights.items()
            ),
        )

    @classmethod
    def found(cls, shape: ModelShape, names: TensorNames, dtype_of: DtypeOf) -> StoredExperts:
        """The layout and format that the first expert is found in; where there is none, those of
        released checkpoints, in which it is then missed."""
        for layout in names.experts:
            experts = cls.of(shape, shape.expert_format, layout)
            for name, size in experts.named_weights(shape.moe_layers[0], 0):
                stored = find_format(name, size, dtype_of)
                if stored is not None:
                    return cls.of(shape, stored, layout)
        return cls.of(shape, shape.expert_format, names.experts[0])

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
        for name, size in self.named_weights(layer, expert):
            yield from self.format.parts(name, size)

    def pieces(self, layer: int, expert: int) -> tuple[StoredPiece, ...]:
        """What is read of an expert, in the order that `matrices` expects."""
        index = expert if self.is_stacked else None
        return tuple(StoredPiece(part.name, index) for part in self.parts(layer, expert))

    def matrices(self, tensors: Sequence[Tensor]) -> dict[str, Matrix]:
        """The matrices of an expert by role, out of what was read; views, nothing is copied."""
        found: dict[str, Matrix] = {}
        if self.format.is_tiled:
            for weight, tensor in zip(self.weights, tensors, strict=True):
                found.update(zip(weight.roles, weight.apart(tensor), strict=True))
            return found
        each = len(tensors) // len(self.weights)
        for number, weight in enumerate(self.weights):
            parts = map(weight.apart, tensors[number * each : (number + 1) * each])
            for role, size, pieces in zip(
                weight.roles, weight.sizes, zip(*parts, strict=True), strict=True
            ):
                found[role] = StoredMatrix(self.format, pieces, (size[0], size[1]))
        return found
