"""The Hierarchical Roofline Model of MoE-Lightning (section 4): what bounds a computation whose
data lies on one level of memory and whose processor may be on another.

A pair of levels is enough at a time: ``i`` is the upper one (GPU memory, or main memory where the
files are the lower one), ``j`` the lower one. ``P`` is a peak in FLOP/s, ``B`` a bandwidth in bytes
per second, ``I`` an operational intensity in FLOP per byte touched on that level. Of the experts
``I_i`` depends on the micro-batch, over which weights are read from the level where they are used,
and ``I_j`` on the whole batch, for which they are brought up once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

from moebatch.layout.footprint import Dtypes
from moebatch.layout.load import PassLoad
from moebatch.layout.routing import distinct_experts
from moebatch.plan.pricing.prices import Prices
from moebatch.spec.machine.hardware import Dtype, Hardware, LevelName, LinkName
from moebatch.spec.model.shape import ModelShape

PAIRS: tuple[tuple[LevelName, LevelName, LinkName], ...] = (
    ("vram", "dram", "dram->vram"),
    ("dram", "disk", "disk->dram"),
)
"""Upper level, lower level, and the link that brings data up."""
Roof = Literal["compute", "memory", "link"]
_MAX_TOKENS = 2.0**60
"""No batch is larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A computation: its arithmetic, and the bytes that it touches on either level."""

    name: str
    flops: float
    bytes_i: float
    bytes_j: float
    """0 if nothing of it lies on level j."""

    @property
    def intensity_i(self) -> float:
        """I_i, FLOP per byte touched on level i."""
        return self.flops / self.bytes_i if self.bytes_i else inf

    @property
    def intensity_j(self) -> float:
        """I_j, FLOP per byte that lies on level j and is moved if it is computed on level i."""
        return self.flops / self.bytes_j if self.bytes_j else inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The roofs of two levels of memory and of the link from the lower to the upper one."""

    level_i: LevelName
    level_j: LevelName
    peak_i: float
    """P_i, FLOP/s (Eq 4)."""
    peak_j: float
    """P_j, FLOP/s; 0 where nothing computes on level j, as on files."""
    bandwidth_i: float
    """B_i, bytes per second."""
    bandwidth_j: float
    """B_j, bytes per second."""
    cross_bandwidth: float
    """B_ji, bytes per second from level j to level i."""

    @property
    def ridge_i(self) -> float:
        """I* of level i (Eq 3), FLOP per byte: from there on arithmetic binds, not memory."""
        return self.peak_i / self.bandwidth_i

    @property
    def ridge_j(self) -> float:
        """I* of level j (Eq 3), FLOP per byte."""
        return self.peak_j / self.bandwidth_j

    def cross_roof(self, intensity_j: float) -> float:
        """FLOP/s on level i that the link allows (Eq 6)."""
        return self.cross_bandwidth * intensity_j

    def local_i(self, intensity_i: float) -> float:
        """FLOP/s on level i with the data there (Eq 8)."""
        return min(self.peak_i, self.bandwidth_i * intensity_i)

    def local_j(self, intensity_j: float) -> float:
        """FLOP/s on level j with the data there (Eq 8)."""
        return min(self.peak_j, self.bandwidth_j * intensity_j)

    def attainable_i(self, intensity_i: float, intensity_j: float) -> float:
        """FLOP/s on level i with the data on level j (Eq 7)."""
        return min(self.local_i(intensity_i), self.cross_roof(intensity_j))

    def bound_i(self, intensity_i: float, intensity_j: float) -> Roof:
        """The lowest roof of Eq 7; of equal ones the one that is hardest to raise."""
        roofs: dict[Roof, float] = {
            "compute": self.peak_i,
            "memory": self.bandwidth_i * intensity_i,
            "link": self.cross_roof(intensity_j),
        }
        return min(roofs, key=lambda name: roofs[name])

    def bound_j(self, intensity_j: float) -> Roof:
        """The lower roof of Eq 8 on level j."""
        return "compute" if self.peak_j <= self.bandwidth_j * intensity_j else "memory"

    @property
    def p1(self) -> float:
        """I_j of turning point P1 (Eq 9): below it the data is better computed where it lies.

        The cross roof meets the roofs of level j on its compute roof, since a link is slower than
        the memory behind it; where it is not, moving always pays and P1 is 0.
        """
        return (
            0.0 if self.cross_bandwidth >= self.bandwidth_j else self.peak_j / self.cross_bandwidth
        )

    def p2(self, intensity_i: float) -> float:
        """I_j of turning point P2 (Eq 10): below it the link binds, above it level i does. Where
        that is by its memory, P2 is the balance point (Eq 11): B_ji I_j = B_i I_i."""
        return self.local_i(intensity_i) / self.cross_bandwidth


def rooflines(hardware: Hardware, dtype: Dtype) -> tuple[Roofline, ...]:
    """Of every pair of levels that a machine has, the fastest first."""
    found = []
    for level_i, level_j, link_name in PAIRS:
        upper, lower = hardware.levels.get(level_i), hardware.levels.get(level_j)
        link = hardware.links.get(link_name)
        if upper is None or upper.processor is None or lower is None or link is None:
            continue
        below = lower.processor
        roofline = Roofline(
            level_i=level_i,
            level_j=level_j,
            peak_i=upper.processor.gemm_for(dtype).peak,
            peak_j=below.gemm_for(dtype).peak if below else 0.0,
            bandwidth_i=upper.processor.bandwidth,
            bandwidth_j=below.bandwidth if below else link.bandwidth,
            cross_bandwidth=link.bandwidth,
        )
        found.append(roofline)
    return tuple(found)


def attention_operation(prices: Prices, batch: float, context: float) -> Operation:
    """Attention of a mean layer in a decode step: one query of each of `batch` sequences against
    what it sees of `context` positions, keys and values on level j.

    Counts both matrix products and no softmax, so that for 16-bit numbers I is nearly the number
    of queries per head of keys, whatever the batch.
    """
    flops, cache_bytes = prices.decode_attention(PassLoad.decoding(batch, context))
    num_bytes = cache_bytes + prices.query_bytes(batch) + prices.attended_bytes(batch)
    return Operation(name="attention", flops=flops, bytes_i=num_bytes, bytes_j=num_bytes)


def ffn_operation(
    shape: ModelShape, dtypes: Dtypes, *, batch: float, micro_batch: float
) -> Operation:
    """Experts of one layer, with weights on level j, on a batch of tokens that goes through
    level i in micro-batches; each reads the experts that some token of it chooses."""
    return Operation(
        name="expert FFN",
        flops=ffn_flops(shape, batch),
        bytes_i=batch / micro_batch * _ffn_bytes(shape, dtypes, micro_batch),
        bytes_j=_ffn_bytes(shape, dtypes, batch),
    )


def ffn_intensity(shape: ModelShape, dtypes: Dtypes) -> Callable[[float], float]:
    """FLOP per byte of the experts of one layer, as a function of the tokens."""
    return lambda tokens: ffn_flops(shape, tokens) / _ffn_bytes(shape, dtypes, tokens)


def tokens_reaching(target: float, intensity: Callable[[float], float]) -> float:
    """The fewest tokens, at least one, for which an intensity that never falls reaches `target`;
    infinite if it never does."""
    low, high = 1.0, 1.0
    while intensity(high) < target:
        low, high = high, 2 * high
        if high > _MAX_TOKENS:
            return inf
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if intensity(middle) < target else (low, middle)
    return high


def ffn_flops(shape: ModelShape, tokens: float) -> float:
    """FLOP of the experts of one layer for `tokens` tokens."""
    return 2 * shape.expert_params * shape.computed_per_token * tokens


def _ffn_bytes(shape: ModelShape, dtypes: Dtypes, tokens: float) -> float:
    """Experts move and lie as they are stored; hidden states are of the compute dtype."""
    weights = distinct_experts(shape, tokens) * dtypes.expert_bytes(shape)
    return weights + 2 * tokens * shape.hidden_size * dtypes.compute_bytes
