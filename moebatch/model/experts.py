"""Experts of a layer in one call of the compiled products, which gather their tokens, gate or
activate what comes in between, and weigh and place what comes out.

Shape letters: T tokens of the pass, K experts per token, D hidden, F expert width, M tokens of one
expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.formats.coded import CodedMatrix
from moebatch.formats.weight_format import Matrix
from moebatch.layout.fused import Middle, middle_of, portions
from moebatch.model.families.usual import bias_of, computed_bias
from moebatch.model.gpu import loader as gpu
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.grouped import ExpertKernels, GroupedExpert
from moebatch.model.native.products import (
    MatrixWork,
    ProductWork,
    matrix_work,
    work_between,
)
from moebatch.model.native.rows import ROW_DTYPES, clamping_of
from moebatch.model.products import Products, num_threads_for
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import ExpertTokens
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate
from moebatch.spec.model.shape import ModelShape

_PUTS: Mapping[Middle, int] = {"gated": 1, "relu": 3, "relu2": 4}
_PUTS_CLAMPED = 2
"""As the C file counts what becomes of sums."""


class Taken(NamedTuple):
    """An expert as the kernel reads it."""

    weights: tuple[Tensor | CodedMatrix, ...]
    """Of gate, up and down, or of the last two, to which `works` point."""
    works: tuple[MatrixWork, ...]
    kind: tuple[object, ...]
    """What works say of them once."""
    biases: tuple[Tensor | None, ...]
    """The same, as they are stored until the expert is computed."""


def expert_kernels(shape: ModelShape, products: Products) -> ExpertKernels | None:
    """Those that compute experts together on the device of the products; None where each is
    computed step by step."""
    middle, device = middle_of(shape), products.device
    if middle is not None and gpu.are_for(device):
        return GroupedExperts(middle)
    return CompiledExperts(products, middle) if middle and device.type == "cpu" else None


class CompiledExperts:
    """Experts on a CPU. Uses the buffer of products, so one thread may use it at a time."""

    def __init__(self, products: Products, middle: Middle = "gated") -> None:
        """`middle` says what comes between products of an expert."""
        self._products = products
        self._puts = _PUTS[middle]
        self._roles = ("gate", "up", "down") if middle == "gated" else ("up", "down")

    def taken(self, matrices: Mapping[str, Matrix], dtype: torch.dtype) -> Taken | None:
        """The same matrices, if the kernel computes an expert that has them over rows of `dtype`:
        one whose gate and up are stored alike."""
        if dtype not in ROW_DTYPES:
            return None
        found = [self._products.taken(matrices[role]) for role in self._roles]
        weights = tuple(weight_OI for weight_OI in found if weight_OI is not None)
        if len(weights) < len(found) or len({*map(_kind, weights[:-1])}) > 1:
            return None
        return Taken(
            weights=weights,
            works=tuple(map(matrix_work, weights)),
            kind=(*_kind(weights[0]), *_kind(weights[-1])),
            biases=tuple(bias_of(matrices, role) for role in self._roles),
        )

    def suits(self, taken: Taken, num_rows: int) -> bool:
        """Whether the kernel multiplies so many rows with what is stored so."""
        are_plain = all(isinstance(weight_OI, Tensor) for weight_OI in taken.weights)
        return are_plain or self._products.multiplies_codes(num_rows)

    def run(
        self,
        frame: Frame,
        experts: Sequence[GroupedExpert],
        routing: Routing,
        *,
        most_rows: int,
        clamped: ClampedGate | None = None,
    ) -> None:
        """As `ExpertKernels.run`. Raises MemoryError if scratch is refused."""
        pieces = [piece for expert in experts for piece in _pieces(frame, expert, most_rows)]
        for chosen in portions([piece.tokens.num_tokens for piece in pieces], most_rows):
            self._run(frame.branch(), pieces[chosen.start : chosen.stop], routing, clamped)

    def _run(
        self,
        frame: Frame,
        pieces: Sequence[GroupedExpert],
        routing: Routing,
        clamped: ClampedGate | None,
    ) -> None:
        counts = [piece.tokens.num_tokens for piece in pieces]
        width, hidden = pieces[0].matrices.weights[0].shape
        inner_MF = frame.take(sum(counts), width)
        num_threads = num_threads_for(len(self._roles) * inner_MF.numel() * hidden)
        works, inner = (ProductWork * (2 * len(pieces)))(), inner_MF.data_ptr()
        like: dict[tuple[object, ...], tuple[ProductWork, ProductWork]] = {}
        for number, (piece, num_rows) in enumerate(zip(pieces, counts, strict=True)):
            taken = piece.matrices
            if taken.kind not in like:
                into, *_, down = taken.weights
                between, placed = self._works_like(into, down, inner_MF, routing, num_threads)
                if clamped is not None:
                    between.puts, between.clamping = _PUTS_CLAMPED, clamping_of(clamped)
                like[taken.kind] = between, placed
            first, second = _places(number, len(pieces))
            works[first], works[second] = like[taken.kind]
            between, placed = works[first], works[second]
            rows, choices = piece.tokens
            between.x_rows = placed.out_rows = rows.data_ptr()
            placed.choices = choices.data_ptr()
            between.out = placed.x = inner
            between.num_rows = placed.num_rows = num_rows
            placed.after = second - first
            between.matrix, *others = taken.works[:-1]
            placed.matrix = taken.works[-1]
            of_each = [between.matrix, placed.matrix]
            if others:
                (between.up,) = others
                of_each.insert(1, between.up)
            for matrix, bias_O in zip(of_each, taken.biases, strict=True):
                if bias_O is not None:
                    matrix.bias = bias_O.data_ptr()
            inner += num_rows * width * inner_MF.itemsize
        works[0].num_products = len(works)
        self._products.run(works, works[0])

    def _works_like(
        self,
        into: Tensor | CodedMatrix,
        down: Tensor | CodedMatrix,
        inner_MF: Tensor,
        routing: Routing,
        num_threads: int,
    ) -> tuple[ProductWork, ProductWork]:
        """What is the same for all experts whose matrices are stored like these."""
        outputs_TKD = routing.outputs_TKD
        between = work_between(routing.inputs_TI, into, inner_MF, num_threads=num_threads)
        between.puts = self._puts
        placed = work_between(inner_MF, down, outputs_TKD, num_threads=num_threads)
        placed.choice_weights = routing.weights_TK.data_ptr()
        placed.num_choices = outputs_TKD.shape[1]
        return between, placed


def _pieces(frame: Frame, expert: GroupedExpert, most_rows: int) -> Iterator[GroupedExpert]:
    """An expert over no more rows than that at a time, its biases in the frame as the kernel reads
    them."""
    (rows_M, choices_M), stored = expert
    biases = tuple(computed_bias(frame, bias_O) for bias_O in stored.biases)
    taken = stored._replace(biases=biases)
    if len(rows_M) <= most_rows:
        yield GroupedExpert(expert.tokens, taken)
        return
    for first in range(0, len(rows_M), most_rows):
        some = slice(first, first + most_rows)
        yield GroupedExpert(ExpertTokens(rows_M[some], choices_M[some]), taken)


def _places(number: int, count: int) -> tuple[int, int]:
    """Where the products of an expert come, up to its inner numbers and behind them: before the
    latter those of the next expert up to its own, so that no thread waits for what another still
    computes."""
    return max(0, 2 * number - 1), min(2 * number + 2, 2 * count - 1)


def _kind(weight_OI: Tensor | CodedMatrix) -> tuple[object, ...]:
    """What a work says of its matrices once."""
    if isinstance(weight_OI, CodedMatrix):
        return weight_OI.numbers, weight_OI.lies, weight_OI.groups is None
    return (weight_OI.dtype,)
