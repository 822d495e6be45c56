"""Everything of a layer that is no matrix product and no attention.

Shape letters: T tokens, D hidden.
"""

from collections.abc import Callable

import numpy as np
import torch

from moebatch.layout.elementwise import elementwise_bytes
from moebatch.layout.scratch import Limits
from moebatch.measure.attention import nothing_to_attend
from moebatch.measure.sizes import Sizes
from moebatch.measure.synthetic import SyntheticLayer, synthetic_layer
from moebatch.measure.timer import Timer
from moebatch.model.attention.span import Span
from moebatch.model.layers import linear

Call = Callable[[], object]
_PROJECTIONS = ("qkv", "o")


def elementwise_bandwidth(sizes: Sizes, dtype: torch.dtype, timer: Timer) -> float:
    """Bytes per second, counted as the planner counts them (`elementwise_bytes`).

    The time is that of routing and combining, and of an attention that attends to nothing without
    its projections: norm, rotation, new keys and values, residual sum.
    """
    num_tokens = sizes.elementwise_tokens
    limits = Limits(
        pass_tokens=num_tokens, micro_batch_tokens=num_tokens, context_tokens=num_tokens
    )
    layer = synthetic_layer(sizes.model, limits, dtype, timer.device)
    moe_s = timer.seconds(_moe(layer, num_tokens))
    around_s, projections_s = timer.seconds_of_each(
        _around_attention(layer, num_tokens), _projections(layer, num_tokens)
    )
    moved = num_tokens * elementwise_bytes(layer.shape, dtype.itemsize)
    return moved / (moe_s + max(around_s - projections_s, 0.0))


def _moe(layer: SyntheticLayer, num_tokens: int) -> Call:
    x_TD, decoder = layer.hidden_states(num_tokens), layer.decoder
    decoder.route(0, x_TD).outputs_TKD.zero_()
    return lambda: decoder.combine(0, x_TD, decoder.route(0, x_TD))


def _around_attention(layer: SyntheticLayer, num_tokens: int) -> Call:
    x_TD, decoder = layer.hidden_states(num_tokens), layer.decoder
    span = Span(
        start=0,
        num_tokens=num_tokens,
        context=0,
        rows_S=np.arange(num_tokens),
        rope_length=num_tokens,
    )
    batch = nothing_to_attend(decoder.planner.plan([span]))
    heads = layer.shape.attention
    parts = tuple(x_TD.new_zeros(2, num_tokens, heads.num_kv_heads, heads.head_dim))
    return lambda: decoder.attend(0, x_TD, batch, parts)


def _projections(layer: SyntheticLayer, num_tokens: int) -> Call:
    weights = [layer.weights[role] for role in _PROJECTIONS]
    inputs = [weight.new_ones(num_tokens, weight.shape[1]) for weight in weights]
    outputs = [weight.new_empty(num_tokens, weight.shape[0]) for weight in weights]

    def project() -> None:
        for x, weight, out in zip(inputs, weights, outputs, strict=True):
            linear(x, weight, None, out)

    return project
