"""Attention whose query heads share heads of keys and values, that of encoders and of the layers
behind them included."""

from dataclasses import dataclass
from typing import Literal

from moebatch.spec.model.attention import (
    SCORED,
    Attention,
    AttentionLaunches,
    Sizes,
    halves_of_neighbours,
    in_all_heads,
    rows_by_part,
)
from moebatch.spec.model.cache_layout import LARGEST_SLICE, CacheLayout, CachePart
from moebatch.spec.model.indexer import BlockIndexer

BIASED_PAIRS = 64 * LARGEST_SLICE
"""Pairs of tokens of a prompt to whose scores numbers are added at a time."""
_GROUP = 5
"""Launches: queries, keys and values are gathered, meet, and results are put back."""
_PROMPT_SLICE = 2
_INDEX_PROJECTIONS = 2
_INDEX_KEYS = 2
"""Those of new tokens are cached, and those of a sequence gathered."""
_CHOSEN = 18
"""Blocks are scored, and the best ones kept."""
_ROWS_OF_CHOSEN = 2
_PLANNED = 9
"""Tokens that have chosen are laid out to attend together."""
QkNorm = Literal["none", "head", "full", "unscaled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedAttention(Attention):
    """Query heads in groups that share a head of keys and values; one each is the usual attention
    of many heads."""

    qk_norm: QkNorm = "none"
    """RMS norm of queries and keys: per head, over their full width, per head without weights, or
    none."""
    value_head_dim: int | None = None
    """Size of a head of values; None is that of queries and keys."""
    value_scale: float = 1.0
    """By what values are multiplied before they are cached."""
    norms_values: bool = False
    """Values are normed per head, without weights."""
    norms_results: bool = False
    """What a head puts out is normed, without weights, before gates weigh it."""
    values_are_keys: bool = False
    """Values are projected as keys are: they are keys before their norm and rotation."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to plus and minus this."""
    num_rotated: int | None = None
    """Numbers of a head that rotate, its first ones; None is all. Where none does, tokens are told
    from each other by what they see alone."""
    indexer: BlockIndexer | None = None

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.num_rotated is None else self.num_rotated

    def row_order(self, role: str) -> list[int] | None:
        """Of projections, biases and norms of queries and keys, where neighbours rotate. Gates of
        all heads come before their queries, which then lie before keys and values."""
        if role in ("gated_q", "gated_q_bias"):
            order = rows_by_part(self.num_heads, (self.head_dim, self.head_dim))
            return order[self.query_width :] + order[: self.query_width]
        heads = {"q": self.num_heads, "k": self.num_kv_heads}
        name, _, kind = role.partition("_")
        if not self.rotates_neighbours or name not in heads or kind not in ("", "bias", "norm"):
            return None
        is_shared = kind == "norm" and self.qk_norm == "head"
        num_heads = 1 if is_shared else heads[name]
        return in_all_heads(num_heads, halves_of_neighbours(self.rotary_dim, self.head_dim))

    @property
    def cached_parts(self) -> CacheLayout:
        heads = CacheLayout.of_heads(self.num_kv_heads, self.head_dim, self.value_head_dim)
        if self.indexer is None:
            return heads
        return CacheLayout((*heads.parts, CachePart("index keys", 1, self.indexer.head_dim)))

    @property
    def caches(self) -> tuple[CacheLayout, ...]:
        """Layers that do not choose have the same keys and values, and no keys to choose by."""
        if self.indexer is None:
            return (self.cache,)
        *heads, keys = self.cache.parts
        return CacheLayout(tuple(heads)), CacheLayout((keys,))

    @property
    def choosing_flops_per_pair(self) -> float:
        """The indexer's."""
        return self.indexer.flops_per_pair if self.indexer else 0.0

    @property
    def launches(self) -> AttentionLaunches:
        """One projection, and one operator of all heads."""
        scored, chooses = SCORED * self.has_sink_scores, self.indexer is not None
        heads = self.indexer.heads_choosing if self.indexer else 1
        return AttentionLaunches(
            projected=1 + (self.value_scale != 1) + chooses * _INDEX_PROJECTIONS,
            norms=self.num_norms + 2 * chooses,
            rotations=(self.rotary_dim > 0) + 2 * chooses,
            group=heads * (_GROUP + scored + chooses * _PLANNED),
            results=int(self.norms_results),
            prompt_slice=_PROMPT_SLICE + scored,
            sequence=chooses * (_INDEX_KEYS + heads * _ROWS_OF_CHOSEN),
            query_block=chooses * _CHOSEN,
        )

    @property
    def cached_value_dim(self) -> int:
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def value_width(self) -> int:
        """Width of the values of a token in one layer, all heads side by side."""
        return self.num_kv_heads * self.cached_value_dim

    def tensors(self, hidden_size: int) -> Sizes:
        """Projections, their biases, norms and sinks."""
        width = self.query_width
        query = {"gated_q": 2 * width} if self.gate == "with queries" else {"q": width}
        values = {} if self.values_are_keys else {"v": self.value_width}
        widths = query | {"k": self.kv_width} | values
        sizes: Sizes = {role: (width, hidden_size) for role, width in widths.items()}
        if self.gate in ("apart", "of heads"):
            sizes["output_gate"] = (self.gate_width, hidden_size)
        if self.has_gate_biases:
            sizes["head_gate_bias"] = (self.num_heads,)
        sizes["o"] = (hidden_size, self.result_width)
        if self.qkv_bias:
            sizes |= {f"{role}_bias": (width,) for role, width in widths.items()}
        if self.output_bias:
            sizes["o_bias"] = (hidden_size,)
        if self.qk_norm in ("head", "full"):
            per_head = self.qk_norm == "head"
            sizes |= {
                f"{role}_norm": (self.head_dim if per_head else width,)
                for role, width in (("q", self.query_width), ("k", self.kv_width))
            }
        if self.has_sink_scores:
            sizes["sink_scores"] = (self.num_heads,)
        return sizes | (self.indexer.tensors(hidden_size) if self.indexer else {})

    def step_rooms(self, num_rows: int, num_cached: int) -> tuple[int, ...]:
        """Queries or keys in float32 that are normed, all three, and results; what chooses."""
        widest = max(
            self.query_width * bool(self.num_norms), self.result_width * self.norms_results
        )
        projected = self.query_width + self.kv_width
        widths = (2 * widest, projected, self.value_width, self.result_width)
        choosing = self.indexer.step_rooms(num_rows, num_cached) if self.indexer else ()
        return (*(num_rows * width for width in widths), *choosing)

    @property
    def flops_per_pair(self) -> int:
        """Scores over heads of keys, sums over heads of values."""
        return 2 * (self.query_width + self.result_width)

    @property
    def num_norms(self) -> int:
        return 2 * (self.qk_norm != "none") + self.norms_values


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeAttention(GroupedAttention):
    """Attention of encoders and decoders without rotary positions and without a scale: a learnt
    number of each head is added to the score of two tokens for the distance between them, counted
    in buckets that grow with it (T5: Raffel et al. 2020, section 2.1). Tokens of answers attend to
    each other, and then to what the encoder has made of their prompt, without such numbers."""

    num_buckets: int
    max_distance: int
    """Distance from which on all are alike."""
    num_rotated: int | None = 0
    score_scale: float | None = 1.0

    def cross_tensors(self, hidden_size: int) -> Sizes:
        """Sizes of what attends to an encoder's output in a layer, by role."""
        wide = (self.query_width, hidden_size)
        sizes: Sizes = {f"cross_{role}": wide for role in "qkv"}
        return sizes | {"cross_o": wide[::-1], "cross_norm": (hidden_size,)}

    def step_rooms(self, num_rows: int, num_cached: int) -> tuple[int, ...]:
        """Queries, keys and values of both kinds, results, and numbers that are added to scores."""
        of_row = (3 * self.query_width, self.query_width)
        biases = self.num_heads * max(num_cached, BIASED_PAIRS)
        return (*(num_rows * width for width in of_row), biases)
