"""FLOP/s of an expert by its rows, as the decoder runs it, with weights that no cache holds.

Shape letters: T tokens, M tokens of the expert, D hidden, K experts per token.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from moebatch.measure.sizes import ModelSizes
from moebatch.measure.synthetic import SyntheticLayer, fill, synthetic_layer
from moebatch.measure.timer import Timer
from moebatch.model.router import ExpertTokens, Routing
from moebatch.plan.scratch import Limits

Points = tuple[tuple[int, float], ...]
"""(rows, FLOP/s), ascending in rows."""


def gemm_curve(
    sizes: ModelSizes,
    rows: Sequence[int],
    dtype: torch.dtype,
    memory: Tensor,
    timer: Timer,
    *,
    longest_s: float,
) -> Points:
    """Rates of ``Decoder.run_expert``: gathering, three products, activation, putting back.

    FLOP are 2 * rows * parameters. `memory` (uint8, on the timer's device) is overwritten by as
    many experts as fit, which take turns. Points that would take longer than `longest_s` each are
    left out, but never the first.
    """
    limits = Limits(pass_tokens=1, micro_batch_tokens=1, context_tokens=1, expert_rows=max(rows))
    layer = synthetic_layer(sizes, limits, dtype, timer.device)
    experts = itertools.cycle(_experts(layer, memory))
    points: list[tuple[int, float]] = []
    for count in sorted(rows):
        flop = 2 * count * layer.shape.expert_params
        # A rate does not fall with the rows: the last one bounds the time from above.
        if points and flop / points[-1][1] > longest_s:
            break
        routing = _routing(layer, count)

        def run(routing: Routing = routing) -> None:
            layer.decoder.run_expert(0, routing, 0, next(experts))

        points.append((count, flop / timer.seconds(run)))
    return tuple(points)


def _experts(layer: SyntheticLayer, memory: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    shape, weights = layer.shape, memory.view(layer.decoder.dtype)
    num_experts = len(weights) // shape.expert_params
    assert num_experts, "the memory must hold an expert"
    fill(weights[: num_experts * shape.expert_params], scale=0.02)
    experts = weights[: num_experts * shape.expert_params].view(num_experts, 3, -1)
    wide, narrow = (shape.expert_width, shape.hidden_size), (shape.hidden_size, shape.expert_width)
    return [(gate.view(wide), up.view(wide), down.view(narrow)) for gate, up, down in experts]


def _routing(layer: SyntheticLayer, num_rows: int) -> Routing:
    """An expert that got `num_rows` tokens from all over the pass, choices being even."""
    shape, device = layer.shape, layer.decoder.device
    step = shape.num_experts // shape.experts_per_token
    num_tokens = num_rows * step
    rows_M = torch.arange(0, num_tokens, step, device=device)
    choices_M = rows_M // step % shape.experts_per_token
    size = (num_tokens, shape.experts_per_token)
    return Routing(
        normed_TD=layer.hidden_states(num_tokens),
        weights_TK=torch.full(size, 0.5, device=device),
        tokens={0: ExpertTokens(rows_M, choices_M)},
        outputs_TKD=torch.zeros(*size, shape.hidden_size, dtype=layer.decoder.dtype, device=device),
    )
