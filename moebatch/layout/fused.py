"""What kernels compute together: which experts, and on a GPU whose attention, whose steps of a
recurrence and whose choices."""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from statistics import NormalDist
from typing import Literal

from moebatch.formats.weight_format import WeightFormat
from moebatch.spec.machine.hardware import Dtype
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.recurrence import MatrixRecurrence, Recurrence
from moebatch.spec.model.shape import ModelShape

MOST_TOGETHER = 16
"""Experts that are computed in one task and give their slots back together: more would keep the
link waiting for these."""
_MANY_ROWS = 128
"""From so many on an expert is computed alone. Estimated: over so many, one of Qwen3-30B-A3B is 1.2
GFLOP, some 10 us of a GPU that does 120 TFLOP/s, and its launches are 60."""
_FEWEST = 1e-3
"""A smaller share of experts is not looked at by itself."""
_NORMAL = NormalDist()
_LARGEST_HEAD = 256
"""Size of one, of which a block of keys and one of values fit into the shared memory."""
_LARGEST_KEY = 256
"""Size of one, of which a program holds some columns of a matrix."""
_MOST_EXPERTS = 2048
"""Among which a program chooses: it holds a number of each."""


Middle = Literal["gated", "relu", "relu2"]
"""What comes between the products of an expert: SwiGLU, clamped or not, or an activation without a
gate."""
_UNGATED: Mapping[str, Middle] = {"relu": "relu", "relu2": "relu2"}


def middle_of(shape: ModelShape) -> Middle | None:
    """That of experts which can be computed together; None of others, and of those whose inputs are
    weighed."""
    if shape.router.weighs_inputs:
        return None
    if shape.expert.is_gated:
        return "gated" if shape.is_swiglu else None
    return _UNGATED.get(shape.activation)


def groups_experts(shape: ModelShape) -> bool:
    """Whether experts of that shape can be computed together."""
    return middle_of(shape) is not None


def takes_stored(shape: ModelShape, stored: WeightFormat, compute: Dtype) -> bool:
    """Whether experts that are stored so can be: in numbers that they are computed in, or in codes
    that are decoded on the way."""
    sizes = shape.expert.matrices(shape.expert_size).values()
    return stored.is_computed_in(compute) or all(map(stored.is_viewed, sizes))


def attends_in_place(shape: ModelShape) -> bool:
    """Whether the kernel of attention suits all layers: keys and values apart, in the type of the
    computation, and nothing that only torch does."""
    return all(
        isinstance(each, GroupedAttention)
        and each.cache_dtype is None
        and not each.sink_window
        and max(each.cached_key_dim, each.cached_value_dim) <= _LARGEST_HEAD
        for each in shape.attentions
    )


def steps_at_once(recurrence: Recurrence) -> bool:
    """Whether a kernel takes the next token of each sequence."""
    return isinstance(recurrence, MatrixRecurrence) and recurrence.key_head_dim <= _LARGEST_KEY


def chooses_at_once(shape: ModelShape) -> bool:
    """Whether a kernel chooses among the experts."""
    is_known = shape.router.logit_cap is None and shape.router.scores != "sqrtsoftplus"
    return shape.num_choices <= _MOST_EXPERTS and is_known


def is_grouped(rows: float) -> bool:
    """Whether an expert over so many tokens is computed together with others."""
    return rows < _MANY_ROWS


def by_rows(mean_rows: float, chance: float) -> list[tuple[float, float]]:
    """Experts that are computed together, and those that are computed alone, where each of many
    tokens chooses any with that chance: their share of all, and the rows that each of them has in
    the mean. Numbers of rows vary, so neither kind is all of them near the bar between them."""
    deviation = sqrt(mean_rows * (1 - chance))
    if not deviation:
        return [(1.0, mean_rows)]
    bar = (_MANY_ROWS - mean_rows) / deviation
    few = _NORMAL.cdf(bar)
    if min(few, 1 - few) < _FEWEST:
        return [(1.0, mean_rows)]
    off = deviation * _NORMAL.pdf(bar)
    return [(few, mean_rows - off / few), (1 - few, mean_rows + off / (1 - few))]


def portions(rows: Sequence[float], most_rows: int) -> Iterator[range]:
    """Experts, by number, whose rows fit into the room for `most_rows` together."""
    first, total = 0, 0.0
    for number, each in enumerate(rows):
        if number > first and total + each > most_rows:
            yield range(first, number)
            first, total = number, 0.0
        total += each
    if rows:
        yield range(first, len(rows))
