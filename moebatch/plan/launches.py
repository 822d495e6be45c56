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
from moebatch.spec.shape import ModelShape, Router

_NORM = 9
"""Into float32, sum of squares, five for its root, back, times the weight."""
_ROTATION = 12
"""Six for queries, and for keys."""
_STORE = 2
"""Keys and values into the cache."""
_DECODE_GROUP = 5
"""Keys, values and queries are gathered, attend, and are put back."""
_PROMPT_SLICE = 2
_OUT = 2
"""Projection, and the sum with what it is added to."""
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
_EXPERT = 6
"""Beside its MLP: tokens are gathered, weighed and put back."""
_COMBINE = 5
_SUM = 3
"""Of what is to be normed."""
_JOINING = 8
"""Tokens by expert, of all micro-batches of a pass together."""
_PARTS = 2
"""Keys and values are moved apart."""


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


def of_expert(rows: float) -> float:
    """One expert over so many tokens, portion by portion."""
    return (_MLP + _EXPERT) * ceil(rows / MAX_GEMM_ROWS)


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


def _of_projection(shape: ModelShape, load: PassLoad) -> float:
    return _NORM + 1 + _NORM * shape.attention.num_norms + _ROTATION


def _of_attention(shape: ModelShape, load: PassLoad) -> float:
    groups = ceil(load.decode_positions / GATHER_ROWS)
    slices = ceil(load.prompt_tokens / PROMPT_ROWS)
    core = _STORE + groups * _DECODE_GROUP + slices * _PROMPT_SLICE
    return _of_projection(shape, load) + core + _of_out(shape, load)


def _of_out(shape: ModelShape, load: PassLoad) -> float:
    return _OUT + _scaling(shape) + _NORM * ("attention_out_norm" in shape.norms)


def _scaling(shape: ModelShape) -> int:
    """Of what is added to the hidden states."""
    return int(shape.residual_scale != 1)


def _of_kv_up(shape: ModelShape, load: PassLoad) -> float:
    """Pages are gathered out of pinned memory. Where they follow each other they are copied run by
    run, in which case the link takes longer than the host."""
    return _PARTS


def _of_kv_down(shape: ModelShape, load: PassLoad) -> float:
    """New rows are gathered, and scattered into pinned memory."""
    return 2 * _PARTS


_OF_BATCH: Mapping[Kind, Callable[[ModelShape, PassLoad], float]] = {
    Kind.ATTEND: _of_attention,
    Kind.PRE: lambda shape, load: _of_projection(shape, load) + 3,
    Kind.OUT: _of_out,
    Kind.OFF: lambda shape, load: 3,
    Kind.LOAD: lambda shape, load: 1,
    Kind.KV_UP: _of_kv_up,
    Kind.KV_DOWN: _of_kv_down,
}
