"""Experts of a layer in one call of the compiled products, which gather their tokens, gate what
comes in between, and weigh and place what comes out.

Shape letters: T tokens of the pass, K experts per token, D hidden, F expert width, M tokens of one
expert.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moebatch.formats.coded import CodedMatrix
from moebatch.formats.weight_format import Matrix
from moebatch.layout.fused import groups_experts, portions
from moebatch.model.gpu.loader import grouped_experts
from moebatch.model.grouped import ExpertKernels, GroupedExpert
from moebatch.model.native.products import ProductWork, set_matrix, work_between
from moebatch.model.native.rows import ROW_DTYPES
from moebatch.model.products import Products, num_threads_for
from moebatch.model.routing.router import ExpertTokens, Routing
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate
from moebatch.spec.model.shape import ModelShape

_GATED, _GATED_CLAMPED = 1, 2
"""As the C file counts what becomes of sums."""
Taken = tuple[Tensor | CodedMatrix, Tensor | CodedMatrix, Tensor | CodedMatrix]
"""Gate, up and down, as the kernel reads them."""


def expert_kernels(shape: ModelShape, products: Products) -> ExpertKernels | None:
    """Those that compute experts together on the device of the products; None where each is
    computed step by step."""
    if products.device.type != "cpu" or not groups_experts(shape):
        return grouped_experts(shape, products.device)
    return grouped_experts(shape, products.device) or CompiledExperts(products, shape.clamped_gate)


class CompiledExperts:
    """SwiGLU experts on a CPU. Uses the threads of products, so one thread may use it at a time."""

    def __init__(self, products: Products, clamped: ClampedGate | None = None) -> None:
        """`clamped` says what gates do otherwise."""
        self._products = products
        self._clamped = clamped

    def taken(
        self, matrices: Mapping[str, Matrix], dtype: torch.dtype, num_rows: int
    ) -> Taken | None:
        """The same matrices, if the kernel computes an expert that has them over so many rows of
        `dtype`: one without biases, whose gate and up are stored alike."""
        if matrices.keys() != {"gate", "up", "down"} or dtype not in ROW_DTYPES:
            return None
        gate, up, down = (
            self._products.taken(matrices[role], num_rows) for role in ("gate", "up", "down")
        )
        if gate is None or up is None or down is None or _kind(gate) != _kind(up):
            return None
        return gate, up, down

    def run(
        self, frame: Frame, experts: Sequence[GroupedExpert], routing: Routing, *, most_rows: int
    ) -> None:
        """Fills the ``outputs_TKD`` of the experts, with room for the inner numbers of `most_rows`
        rows at a time. Raises MemoryError if scratch is refused."""
        pieces = [piece for expert in experts for piece in _pieces(expert, most_rows)]
        for chosen in portions([len(piece.tokens.rows_M) for piece in pieces], most_rows):
            self._run(frame.branch(), pieces[chosen.start : chosen.stop], routing)

    def _run(self, frame: Frame, pieces: Sequence[GroupedExpert], routing: Routing) -> None:
        counts = [len(piece.tokens.rows_M) for piece in pieces]
        width, hidden = pieces[0].matrices[0].shape
        inner_MF = frame.take(sum(counts), width)
        num_threads = num_threads_for(3 * inner_MF.numel() * hidden)
        works, start = (ProductWork * (2 * len(pieces)))(), 0
        for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            inner, (first, second) = inner_MF[start:], _places(number, len(pieces))
            gate, up, down = piece.matrices
            works[first] = self._gated(piece.tokens, routing, inner, gate, up, num_threads)
            works[second] = _placed(piece.tokens, routing, inner, down, num_threads)
            works[first].num_rows = works[second].num_rows = count
            works[second].after = second - first
            start += count
        works[0].num_products = len(works)
        self._products.run(works, works[0])

    def _gated(
        self,
        tokens: ExpertTokens,
        routing: Routing,
        inner_MF: Tensor,
        gate: Tensor | CodedMatrix,
        up: Tensor | CodedMatrix,
        num_threads: int,
    ) -> ProductWork:
        work = work_between(routing.normed_TD, gate, inner_MF, num_threads=num_threads)
        work.x_rows = tokens.rows_M.data_ptr()
        work.puts = _GATED
        if self._clamped is not None:
            work.puts = _GATED_CLAMPED
            work.limit, work.alpha = self._clamped.limit, self._clamped.alpha
        set_matrix(work.matrix, gate)
        set_matrix(work.up, up)
        return work


def _placed(
    tokens: ExpertTokens,
    routing: Routing,
    inner_MF: Tensor,
    down: Tensor | CodedMatrix,
    num_threads: int,
) -> ProductWork:
    work = work_between(inner_MF, down, routing.outputs_TKD, num_threads=num_threads)
    work.out_rows, work.choices = (each.data_ptr() for each in tokens)
    work.choice_weights = routing.weights_TK.data_ptr()
    work.num_choices = routing.outputs_TKD.shape[1]
    set_matrix(work.matrix, down)
    return work


def _pieces(expert: GroupedExpert, most_rows: int) -> Iterator[GroupedExpert]:
    """An expert over no more rows than that at a time."""
    rows_M, choices_M = expert.tokens
    for first in range(0, len(rows_M), most_rows):
        some = slice(first, first + most_rows)
        yield GroupedExpert(ExpertTokens(rows_M[some], choices_M[some]), expert.matrices)


def _places(number: int, count: int) -> tuple[int, int]:
    """Where the products of an expert come, up to the gate and behind it: before the latter those
    of the next expert up to its gate, so that no thread waits for what another still computes."""
    return max(0, 2 * number - 1), min(2 * number + 2, 2 * count - 1)


def _kind(weight_OI: Tensor | CodedMatrix) -> tuple[object, ...]:
    """What a work says of its matrices once."""
    if isinstance(weight_OI, CodedMatrix):
        return weight_OI.numbers, weight_OI.groups is None
    return (weight_OI.dtype,)
