"""FLOP/s of an expert by its rows, as the decoder runs it, with weights that no cache holds.

Shape letters: T tokens, M tokens of the expert, D hidden, K experts per token.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moebatch.checkpoint.direct import align_up
from moebatch.checkpoint.record import TORCH_DTYPES
from moebatch.formats.weight_format import StoredPart, WeightFormat
from moebatch.layout.fused import MOST_TOGETHER, is_grouped
from moebatch.layout.scratch import KERNEL_BLOCK_ROWS, Limits
from moebatch.measure.sizes import ModelSizes
from moebatch.measure.synthetic import SyntheticLayer, fill, synthetic_layer
from moebatch.measure.timer import Timer
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import ExpertTokens, TokensByExpert

_ALIGNMENT = 64
_FEW_ROWS = (1, 5)
"""Kernels may decode in registers for up to four rows; for five all of them make a tile."""
_FALL = 0.9
"""A rate does not fall with the rows: one that is lower than this was disturbed."""
Points = tuple[tuple[int, float], ...]
"""(rows, rate), ascending in rows."""


def gemm_curve(
    sizes: ModelSizes,
    rows: Sequence[int],
    dtype: torch.dtype,
    experts: Iterator[Tensor],
    timer: Timer,
    *,
    longest_s: float,
    stored: WeightFormat | None = None,
) -> Points:
    """Rates of ``Decoder.run_experts``: gathering, three products, activation, putting back.

    FLOP are 2 * rows * parameters. `experts` gives the bytes (uint8) of one after the other, for
    ever, on the timer's device; how long it takes to give one does not count. They are `stored` so,
    if another way than they are computed in. Points that would take longer than
    `longest_s` each are left out, but never the first. One that is clearly lower than the one
    before is measured twice.
    """
    limits = Limits(pass_tokens=1, micro_batch_tokens=1, context_tokens=1, expert_rows=max(rows))
    layer = synthetic_layer(sizes, limits, dtype, timer.device, stored=stored)
    following = _NextExperts(layer, experts)
    points: list[tuple[int, float]] = []
    for count in sorted(rows):
        together = MOST_TOGETHER if is_grouped(count) and timer.device.type == "cuda" else 1
        flop = 2 * count * layer.shape.expert_params * together
        # The last rate bounds the time from above.
        if points and flop / points[-1][1] > longest_s:
            break
        routing = _routing(layer, count, together)

        def run(routing: Routing = routing) -> None:
            layer.decoder.run_experts(0, routing, following.parts)

        prepare = partial(following.take, together)
        rate = flop / timer.seconds(run, prepare=prepare)
        if points and rate < _FALL * points[-1][1]:
            rate = max(rate, flop / timer.seconds(run, prepare=prepare))
        points.append((count, rate))
    return tuple(points)


def decoding_points(
    sizes: ModelSizes,
    plain: Points,
    dtype: torch.dtype,
    stored: WeightFormat,
    decoded_rows: int,
    memory: Tensor,
    timer: Timer,
) -> Points:
    """Bytes per second, by rows, of `stored` weights that are computed in `dtype`, each decoded
    once for `decoded_rows` rows, from the time that an expert takes beyond that of one of such
    numbers, which has the rates `plain`. Overwrites `memory` (uint8).

    Where a kernel decodes on the way, that is the time beyond arithmetic at the highest of these
    rates, of so few rows that decoding is nearly all of it: of many, the difference of two large
    figures would be mostly noise. Else it is the time of many rows, whatever decodes for few.
    A hundredth of that time is the least that can be told.
    """
    size = _expert_parts_bytes(sizes, stored)
    whole = memory[: len(memory) // size * size].view(-1, size)
    for expert in whole:
        _fill(expert, sizes, stored)
    counts: Sequence[int] = _FEW_ROWS
    plain_rate = max(rate for _, rate in plain)
    if decoded_rows > KERNEL_BLOCK_ROWS:
        enough = (point for point in plain if point[0] >= KERNEL_BLOCK_ROWS)
        many, plain_rate = next(enough, plain[-1])
        counts = (many,)
    timer = replace(timer, budget_s=timer.budget_s / len(counts))  # there are many formats
    measured = gemm_curve(
        sizes, counts, dtype, itertools.cycle(whole), timer, longest_s=math.inf, stored=stored
    )
    points = []
    # Where all of a matrix is decoded before it is multiplied, the one rate is that of any rows.
    for rows, (count, rate) in zip(_FEW_ROWS, measured, strict=False):
        flop = 2 * count * 3 * sizes.hidden_size * sizes.expert_width
        plain_s = flop / plain_rate
        decoding_s = max(flop / rate - plain_s, plain_s / 100)
        points.append((rows, math.ceil(count / decoded_rows) * size / decoding_s))
    return tuple(points)


def expert_bytes(sizes: ModelSizes, dtype: torch.dtype) -> int:
    return 3 * sizes.hidden_size * sizes.expert_width * dtype.itemsize


def experts_in(memory: Tensor, sizes: ModelSizes, dtype: torch.dtype) -> Iterator[Tensor]:
    """As many experts as fit into `memory` (uint8), which is overwritten, taking turns."""
    size = expert_bytes(sizes, dtype)
    assert len(memory) >= size, "the memory must hold an expert"
    whole = memory[: len(memory) // size * size]
    fill(whole.view(dtype), scale=0.02)
    return itertools.cycle(whole.view(-1, size))


def _expert_parts(sizes: ModelSizes, stored: WeightFormat) -> list[tuple[StoredPart, ...]]:
    """Of the three matrices of an expert."""
    wide = (sizes.expert_width, sizes.hidden_size)
    return [stored.parts("", shape) for shape in (wide, wide, wide[::-1])]


def _expert_parts_bytes(sizes: ModelSizes, stored: WeightFormat) -> int:
    """Room of an expert, such that the next one is aligned."""
    parts = itertools.chain(*_expert_parts(sizes, stored))
    return align_up(_places(parts)[-1], _ALIGNMENT)


def _fill(memory: Tensor, sizes: ModelSizes, stored: WeightFormat) -> None:
    """Makes an expert of `memory` (uint8)."""
    matrices = _expert_parts(sizes, stored)
    tensors = _tensors(memory, list(itertools.chain(*matrices)))
    for parts in matrices:
        stored.fill([next(tensors).view(-1).view(torch.uint8) for _ in parts])


def _tensors(memory: Tensor, parts: Sequence[StoredPart]) -> Iterator[Tensor]:
    """Parts that lie one after the other in `memory` (uint8)."""
    for place, part in zip(_places(parts), parts, strict=False):
        raw = memory[place : place + part.num_bytes]
        yield raw.view(TORCH_DTYPES[part.dtype]).view(part.shape)


def _places(parts: Iterable[StoredPart]) -> list[int]:
    """Where parts begin that lie one after the other, and where they end."""
    places = [0]
    for part in parts:
        begin = align_up(places.pop(), TORCH_DTYPES[part.dtype].itemsize)
        places += [begin, begin + part.num_bytes]
    return places


class _NextExperts:
    """The tensors of those whose turn it is."""

    def __init__(self, layer: SyntheticLayer, experts: Iterator[Tensor]) -> None:
        self._layer = layer
        self._experts = experts
        self.parts: dict[int, tuple[Tensor, ...]] = {}

    def take(self, number: int) -> None:
        """Goes on to the next ones, of which there are so many."""
        self.parts = {expert: self._next() for expert in range(number)}

    def _next(self) -> tuple[Tensor, ...]:
        memory = next(self._experts).view(torch.uint8)
        return tuple(_tensors(memory, tuple(self._layer.experts.parts(0, 0))))


def _routing(layer: SyntheticLayer, num_rows: int, num_experts: int) -> Routing:
    """Experts that got the same `num_rows` tokens from all over the pass, choices being even."""
    shape, device = layer.shape, layer.decoder.device
    step = shape.num_experts // shape.experts_per_token
    num_tokens = num_rows * step
    rows_M = torch.arange(0, num_tokens, step, device=device)
    choices_M = rows_M // step % shape.experts_per_token
    tokens = ExpertTokens(rows_M.repeat(num_experts), choices_M.repeat(num_experts))
    size = (num_tokens, shape.experts_per_token)
    return Routing(
        rows=(slice(0, num_tokens),),
        normed_TD=layer.hidden_states(num_tokens),
        weights_TK=torch.full(size, 0.5, device=device),
        experts_TK=torch.zeros(size, dtype=torch.int64, device=device),
        num_experts=shape.num_experts,
        tokens=TokensByExpert(dict.fromkeys(range(num_experts), num_rows), lambda: tokens),
        outputs_TKD=torch.zeros(*size, shape.hidden_size, dtype=layer.decoder.dtype, device=device),
    )
