"""How many kernels and copies a task is to a GPU: each of them has to be launched.

Counted from what the engine does, operator by operator; tests hold these numbers against it. What
depends on lengths that a `PassLoad` does not know is said where it is guessed.
"""

from collections.abc import Callable, Mapping
from functools import cache
from math import ceil

from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import (
    GATHER_ROWS,
    MAX_GEMM_ROWS,
    MLP_NORMS,
    PROMPT_ROWS,
    logits_rows,
)
from moebatch.layout.setup import CHUNK_BYTES
from moebatch.schedule.task import Kind
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.recurrence import CHUNK_TOKENS, GatedDelta
from moebatch.spec.model.shape import ModelShape

_NORM = 9
"""Into float32, sum of squares, five for its root, back, times the weight."""
_ROTATION = 12
"""Six for queries, and for keys."""
_DECODE_GROUP = 3
"""Queries are gathered, attend to what is gathered of the cache, and results are put back."""
_PROMPT_SLICE = 2
_SINK_SCORES = 12
"""Attention with scores of its own for sinks, which no single operator knows."""
_ABSORBED = 2
"""Queries brought to latents, and the part with positions behind them."""
_BROUGHT_BACK = 1
"""Of sums of latents to values."""
_EXPANDED = 2
"""Latents of a slice are gathered, and the rotated key goes to all heads."""
_OUTPUT_GATE = 3
_OUT = 2
"""Projection, and the sum with what it is added to."""
_DELTA = 32
"""Beside its norm, its two projections and the sum: states that begin are filled, taps laid out,
keys and queries made unit vectors, rates and fading, and the gated norm of what comes out."""
_DELTA_STEP = 19
"""Sequences that decode, in neighbouring rows of the state, but for taps of the convolution."""
_DELTA_CHUNK = 33
"""The same of some tokens of a prompt."""
_TAP = 2
_CHOICE = 5
"""Of experts: product, softmax, the best, and two copies of what was chosen."""
_CORRECTION = 4
"""Added; scores of what is chosen taken, and sorted."""
_GROUPS = 8
"""The best of each, their sum, the best groups, and others masked."""
_WEIGHING = 4
"""Weights of experts taken, multiplied, and all sorted anew."""
_GROUPING = 7
"""Tokens by expert: counted, and sorted."""
_MLP = 5
_CLAMPING = 5
_EXPERT = 6
"""Beside its MLP: tokens are gathered, weighed and put back."""
_COMBINE = 5
_SUM = 3
"""Of what is to be normed."""
_JOINING = 8
"""Tokens by expert, of all micro-batches of a pass together."""


def of_batch(shape: ModelShape, kind: Kind, load: PassLoad) -> float:
    """Launches of a task that depends on nothing but what its micro-batch has to do; 0 for others
    and for those of a CPU."""
    count = _OF_BATCH.get(kind)
    return 0.0 if count is None else count(shape, load)


@cache
def of_gates(shape: ModelShape) -> tuple[int, ...]:
    """By layer: norm and router, or norm and MLP where there are no experts."""
    gate = _NORM + 1 + _choice(shape.router) + _GROUPING + _NORM * shape.router.has_own_norm
    dense = _NORM + _MLP + 1 + _scaling(shape)
    return tuple(gate if layer in shape.moe_layers else dense for layer in range(shape.num_layers))


def _choice(router: Router) -> int:
    """What follows the logits of a gate."""
    return (
        _CHOICE
        + router.has_exact_logits
        + _CORRECTION * router.has_correction
        + _GROUPS * (router.groups is not None)
        + 2 * (router.norm_order is not None)
        + bool(router.least_norm)
        + (router.scale != 1.0)
        + _WEIGHING * router.weighs_experts
    )


def of_expert(shape: ModelShape, rows: float) -> float:
    """One expert over so many tokens, portion by portion."""
    expert = shape.expert
    beside = len(expert.roles) * expert.bias + _CLAMPING * (shape.clamped_gate is not None)
    return (_MLP + _EXPERT + beside) * ceil(rows / MAX_GEMM_ROWS)


def of_combine(shape: ModelShape, *, is_joined: bool) -> int:
    """The end of a layer: outputs are added up, with those of a shared expert if there is one."""
    shared = 2 + _MLP if shape.shared_expert else 0
    mixed = 3 * bool(shared and shape.shared_expert_gate)
    norms = (_NORM + _SUM) * len(MLP_NORMS & {*shape.norms})
    others = _scaling(shape) + shape.scales_layers
    return _COMBINE + _JOINING * is_joined + shared + mixed + norms + others


def of_head(shape: ModelShape, rows: float, dtype_bytes: int) -> float:
    """Logits after so many tokens, block by block: rows gathered, normed, multiplied, copied, and
    scaled perhaps."""
    end = (shape.logit_scale != 1) + 3 * (shape.logit_cap is not None)
    return (_NORM + 3 + end) * ceil(rows / logits_rows(shape, dtype_bytes))


def num_chunks(expert_bytes: int) -> int:
    """Pieces in which an expert is moved."""
    return max(1, ceil(expert_bytes / CHUNK_BYTES))


def of_transfer(expert_bytes: int) -> int:
    """Copies of one expert: its pieces, cut once more where one of its three tensors ends."""
    return num_chunks(expert_bytes) + 2


def _of_projection(shape: ModelShape) -> int:
    """Up to what is cached, rotated, from the norm on."""
    attention = shape.attention
    if not isinstance(attention, LatentAttention):
        return _NORM + 1 + _NORM * attention.num_norms + _ROTATION
    compressing = 0 if attention.query_rank is None else 1 + _NORM
    return _NORM + compressing + 2 + _NORM + _ROTATION


def _of_mixer(shape: ModelShape, load: PassLoad) -> float:
    """Of a mean layer, which attends or recurs."""
    attending = shape.num_attention_layers / shape.num_layers
    found = attending * _of_attention(shape, load)
    if shape.recurrence is not None:
        recurring = _of_recurrence(shape.recurrence, load) + _added(shape)
        found += (1 - attending) * recurring
    return found


def _of_attention(shape: ModelShape, load: PassLoad) -> float:
    attention, parts = shape.attention, _num_parts(shape)
    group, one_slice = _DECODE_GROUP + parts, _PROMPT_SLICE
    if isinstance(attention, LatentAttention):
        group += _ABSORBED + _BROUGHT_BACK
        one_slice += _EXPANDED + 2 * attention.num_heads
    elif isinstance(attention, GroupedAttention) and attention.has_sink_scores:
        group += _SINK_SCORES
        one_slice += _SINK_SCORES
    groups = ceil(load.decode_positions / GATHER_ROWS)
    slices = ceil(load.prompt_tokens / PROMPT_ROWS)
    core = parts + groups * group + slices * one_slice
    return _of_projection(shape) + core + _OUTPUT_GATE * attention.gates_output + _added(shape)


def _of_recurrence(delta: GatedDelta, load: PassLoad) -> float:
    """Rows of states are taken for neighbours, as they are until sequences end."""
    steps = ceil(load.decode_sequences / CHUNK_TOKENS)
    chunks = ceil(load.prompt_tokens / CHUNK_TOKENS)
    taps = _TAP * delta.conv_width
    return _NORM + 1 + _DELTA + steps * (_DELTA_STEP + taps) + chunks * (_DELTA_CHUNK + taps)


def _of_pre(shape: ModelShape, load: PassLoad) -> float:
    """Queries, and what is cached, are laid out for another device."""
    absorbed = _ABSORBED * isinstance(shape.attention, LatentAttention)
    return _of_projection(shape) + absorbed + 1 + _num_parts(shape)


def _of_out(shape: ModelShape, load: PassLoad) -> float:
    """Sums of latents are brought back before."""
    return _added(shape) + _BROUGHT_BACK * isinstance(shape.attention, LatentAttention)


def _added(shape: ModelShape) -> int:
    """What is projected at last, and added to the hidden states."""
    return _OUT + _scaling(shape) + _NORM * ("attention_out_norm" in shape.norms)


def _scaling(shape: ModelShape) -> int:
    """Of what is added to the hidden states."""
    return int(shape.residual_scale != 1)


def _of_kv_up(shape: ModelShape, load: PassLoad) -> float:
    """Pages are gathered out of pinned memory. Where they follow each other they are copied run by
    run, in which case the link takes longer than the host."""
    return _num_parts(shape)


def _of_kv_down(shape: ModelShape, load: PassLoad) -> float:
    """New rows are gathered, and scattered into pinned memory."""
    return 2 * _num_parts(shape)


def _num_parts(shape: ModelShape) -> int:
    """What is cached of a token is moved part by part; of a state there are two as well."""
    return len(shape.attention.cached_parts.parts)


_OF_BATCH: Mapping[Kind, Callable[[ModelShape, PassLoad], float]] = {
    Kind.ATTEND: _of_mixer,
    Kind.PRE: _of_pre,
    Kind.OUT: _of_out,
    Kind.OFF: lambda shape, load: 1 + _num_parts(shape),
    Kind.LOAD: lambda shape, load: 1,
    Kind.KV_UP: _of_kv_up,
    Kind.KV_DOWN: _of_kv_down,
}
