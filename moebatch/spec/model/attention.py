"""Kinds of attention: their tensors, what they cache of a token, and what they take to compute.

Shape letters: D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moebatch.spec.model.cache_layout import (
    LARGEST_SLICE,
    CacheDtype,
    CacheLayout,
    CachePart,
    SinkWindow,
)

_EXPANDED_NUMBERS = 2**24
"""Keys and values that are made of latents at a time, unless those of one head are more."""
_ALIGNMENT = 64
"""Numbers between two temporaries, at the most."""
BIASED_PAIRS = 64 * LARGEST_SLICE
"""Pairs of tokens of a prompt to whose scores numbers are added at a time."""
QkNorm = Literal["none", "head", "full", "unscaled"]
Sizes = dict[str, tuple[int, ...]]


def halves_of_neighbours(rotary_dim: int, head_dim: int) -> list[int]:
    """The order of the numbers of a head, of which the first rotate in pairs of neighbours, that
    puts the first of each pair into one half of these, and the second into the other."""
    first, second = range(0, rotary_dim, 2), range(1, rotary_dim, 2)
    return [*first, *second, *range(rotary_dim, head_dim)]


def rows_by_part(num_groups: int, parts: Sequence[int]) -> list[int]:
    """Rows of a matrix that has all parts of a group together, so many rows each, in an order that
    has all groups of a part together."""
    step, order, first = sum(parts), list[int](), 0
    for part in parts:
        for group in range(num_groups):
            start = group * step + first
            order.extend(range(start, start + part))
        first += part
    return order


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by more the later they come: ``1 + strength * log(1 + floor(position /
    step))``, positions counted from one (Llama 4)."""

    step: int
    strength: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(ABC):
    """Attention of layers that attend alike."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head of queries and keys, the part without positions included."""
    qkv_bias: bool = False
    output_bias: bool = False
    rotates_neighbours: bool = False
    """Numbers that rotate together lie side by side in checkpoints; else each is as far from the
    other as half of what rotates is wide. The rows of projections are put in order when they are
    read, so that all are computed the second way, which leaves every score as it is."""
    norms_rotated: bool = False
    """Queries and keys are normed after they have been rotated, not before."""
    rotary: str | None = None
    """Name of its rotary parameters in ``config.json``, where layers have several kinds of them."""
    temperature: Temperature | None = None
    score_scale: float | None = None
    """By what scores are multiplied before their softmax; None is one by the root of a head's
    size."""
    cache_dtype: CacheDtype | None = None
    """8 bits in which a job has keys and values cached; None is the dtype of the computation."""
    sink_window: SinkWindow | None = None
    """What a job has tokens see in layers that see that much or more; None is all that they see."""

    @property
    def cache(self) -> CacheLayout:
        """What the cache holds."""
        return self.cached_parts.cached_in(self.cache_dtype)

    @property
    @abstractmethod
    def cached_parts(self) -> CacheLayout:
        """What is cached of a token, in whatever dtype."""

    @abstractmethod
    def tensors(self, hidden_size: int) -> Sizes:
        """Sizes of the weights of a layer, by role."""

    @property
    @abstractmethod
    def flops_per_pair(self) -> int:
        """FLOP in one layer for a query and a position that it sees, scores and weighted sum,
        all heads: what prompt tokens take, whose keys and values lie there in full."""

    @property
    @abstractmethod
    def decode_flops_per_pair(self) -> int:
        """The same for a decoding query over cached positions."""

    def expands(self, num_new: int, num_context: int) -> bool:
        """Whether a slice of so many new tokens attends to keys and values that are made anew of
        what is cached, its own and those of the context, rather than to what is cached."""
        return False

    def prompt_flops(self, num_pairs: float, num_context: float) -> float:
        """FLOP in one layer of tokens of prompts that see so many positions, all counted, and have
        so many before their slices, counted for each slice."""
        return num_pairs * self.flops_per_pair

    @property
    def scale(self) -> float:
        """As `score_scale` says."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def cached_key_dim(self) -> int:
        """Size of a head of keys as they are cached, and of queries that meet them there."""
        return self.head_dim

    @property
    def cached_value_dim(self) -> int:
        """Size of a head of values as they are cached, and of sums of these."""
        return self.head_dim

    @property
    def rotated_from(self) -> int:
        """Where in a head of keys, as they are cached, the numbers begin that have positions."""
        return 0

    @property
    def sent_width(self) -> int:
        """Numbers of a token that attention takes where it has no weights: queries, and what the
        cache is to hold."""
        return self.num_heads * self.cached_key_dim + self.cached_parts.width

    @property
    def result_width(self) -> int:
        """Numbers of a token that it puts out, before the last of its weights."""
        return self.num_heads * self.cached_value_dim

    @property
    def num_shared(self) -> int:
        """Query heads that share a head of keys as they are cached."""
        return self.num_heads // self.cached_parts.parts[0].num_heads

    @abstractmethod
    def step_rooms(self, num_rows: int, num_cached: int) -> tuple[int, ...]:
        """Numbers of what is kept between the norm before attention and the projection behind it,
        each by itself, where a micro-batch has so many rows and so many cached ones are gathered
        at once."""

    @property
    def positioned_dim(self) -> int:
        """Size of the part of a head that has positions."""
        return self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that rotate with its position, at the beginning of the part that has
        positions."""
        return self.head_dim

    def row_order(self, role: str) -> list[int] | None:
        """In which order the rows of a stored weight are computed with; None where they lie so."""
        return None

    @property
    def query_width(self) -> int:
        """Width of the queries of a token, all heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of a token in one layer, all heads side by side."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_norms(self) -> int:
        """How many of queries, keys and values are normed before they meet."""
        return 0

    @property
    def gates_output(self) -> bool:
        """Whether what attention puts out is weighed by gates that its input opens."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedAttention(Attention):
    """Query heads in groups that share a head of keys and values; one each is the usual attention
    of many heads."""

    qk_norm: QkNorm = "none"
    """RMS norm of queries and keys: per head, over their full width, per head without weights, or
    none."""
    norms_values: bool = False
    """Values are normed per head, without weights."""
    values_are_keys: bool = False
    """Values are projected as keys are: they are keys before their norm and rotation."""
    has_gate: bool = False
    """Each number that attention puts out is weighed by a sigmoid gate, which is projected beside
    the queries: stored head by head, the query's rows before the gate's."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to plus and minus this."""
    has_sink_scores: bool = False
    """Each head has a learnt score that takes part in its softmax and has no value. These are no
    tokens, unlike the sinks of a `SinkWindow`."""
    num_rotated: int | None = None
    """Numbers of a head that rotate, its first ones; None is all. Where none does, tokens are told
    from each other by what they see alone."""

    @property
    def rotary_dim(self) -> int:
        """As `num_rotated` says."""
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
        starts = range(0, num_heads * self.head_dim, self.head_dim)
        of_head = halves_of_neighbours(self.rotary_dim, self.head_dim)
        return [start + row for start in starts for row in of_head]

    @property
    def cached_parts(self) -> CacheLayout:
        """Keys and values."""
        return CacheLayout.of_heads(self.num_kv_heads, self.head_dim)

    def tensors(self, hidden_size: int) -> Sizes:
        """Projections, their biases, norms and sinks."""
        query = {"gated_q": 2 * self.query_width} if self.has_gate else {"q": self.query_width}
        widths = query | dict.fromkeys("k" if self.values_are_keys else "kv", self.kv_width)
        sizes: Sizes = {role: (width, hidden_size) for role, width in widths.items()}
        sizes["o"] = (hidden_size, self.query_width)
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
        return sizes

    def step_rooms(self, num_rows: int, num_cached: int) -> tuple[int, ...]:
        """Queries or keys in float32 that are normed, all three, and results."""
        normed = 2 * self.query_width * bool(self.num_norms)
        projected = self.query_width + self.kv_width
        widths = (normed, projected, self.kv_width, self.query_width)
        return tuple(num_rows * width for width in widths)

    @property
    def flops_per_pair(self) -> int:
        """Scores and sums over heads of the same size."""
        return 4 * self.query_width

    @property
    def decode_flops_per_pair(self) -> int:
        """As for prompts."""
        return self.flops_per_pair

    @property
    def num_norms(self) -> int:
        """As `qk_norm` and `norms_values` say."""
        return 2 * (self.qk_norm != "none") + self.norms_values

    @property
    def gates_output(self) -> bool:
        """As `has_gate` says."""
        return self.has_gate


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads are
    made of one compressed vector per token, and that alone is cached."""

    kv_rank: int
    """Width of the compressed keys and values (``kv_lora_rank``)."""
    query_rank: int | None
    """Width of compressed queries (``q_lora_rank``); None where queries are not compressed."""
    rope_head_dim: int
    """Part of a query's and a key's head that has positions; the key's is one for all heads."""
    value_head_dim: int
    """Size of a head of values; ``head_dim`` is that of queries and keys."""

    @property
    def positioned_dim(self) -> int:
        """The part beside the one that latents are for."""
        return self.rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """All of the part that has positions."""
        return self.rope_head_dim

    def row_order(self, role: str) -> list[int] | None:
        """Keys of all heads before their values; halves of what rotates, behind what does not."""
        plain, rope = self.nope_head_dim, self.rope_head_dim
        if role == "kv_b":
            step, heads = plain + self.value_head_dim, range(self.num_heads)
            keys = [head * step + row for head in heads for row in range(plain)]
            return keys + [head * step + row for head in heads for row in range(plain, step)]
        widths = {"q": plain, "q_b": plain, "kv_a": self.kv_rank, "kv_a_bias": self.kv_rank}
        if role not in widths or not self.rotates_neighbours:
            return None
        before, num_heads = widths[role], 1 if role.startswith("kv_a") else self.num_heads
        of_head = [*range(before), *(before + row for row in halves_of_neighbours(rope, rope))]
        starts = range(0, num_heads * len(of_head), len(of_head))
        return [start + row for start in starts for row in of_head]

    @property
    def cached_parts(self) -> CacheLayout:
        """Latents, and behind each the part of the keys that has positions: one head of keys, of
        which the latents are the values."""
        return CacheLayout((CachePart("latents", 1, self.kv_rank + self.rope_head_dim),))

    @property
    def nope_head_dim(self) -> int:
        """Part of a query's and a key's head that has no positions."""
        return self.head_dim - self.rope_head_dim

    @property
    def cached_key_dim(self) -> int:
        """That of a latent and a rotated key."""
        return self.kv_rank + self.rope_head_dim

    @property
    def cached_value_dim(self) -> int:
        """That of a latent."""
        return self.kv_rank

    @property
    def rotated_from(self) -> int:
        """Behind the latent."""
        return self.kv_rank

    def heads_expanded_at_once(self, num_cached: int) -> int:
        """Heads whose keys and values of so many positions are made together."""
        of_head = num_cached * (self.head_dim + self.value_head_dim)
        return max(1, min(self.num_heads, _EXPANDED_NUMBERS // of_head))

    def step_rooms(self, num_rows: int, num_cached: int) -> tuple[int, ...]:
        """Compressed queries and latents, each with room in float32 to be normed in; queries, as
        they are and as they meet what is cached; results of both; keys and values made anew."""
        heads, of_head = self.num_heads, num_cached * (self.head_dim + self.value_head_dim)
        expanded = max(of_head, min(heads * of_head, _EXPANDED_NUMBERS))
        of_row = (
            self.query_rank or 0,
            2 * (self.query_rank or 0),
            self.cached_key_dim,
            2 * self.kv_rank,
            self.query_width,
            heads * self.cached_key_dim,
            heads * self.cached_value_dim,
            heads * self.value_head_dim,
        )
        return (*(num_rows * width for width in of_row), expanded + _ALIGNMENT)

    def expands(self, num_new: int, num_context: int) -> bool:
        """Where that takes fewer operations. Those of new tokens cost as much as bringing their
        queries to the latents and the results back; those of the context are made once for all new
        tokens, whose scores and sums are then cheaper."""
        num_pairs = num_new * num_context + num_new * (num_new + 1) // 2
        as_cached = num_pairs * self.decode_flops_per_pair
        return num_new > 1 and self._expanded_flops(num_pairs, num_context) < as_cached

    def prompt_flops(self, num_pairs: float, num_context: float) -> float:
        """In whichever way that takes fewer."""
        as_cached = num_pairs * self.decode_flops_per_pair
        return min(as_cached, self._expanded_flops(num_pairs, num_context))

    def _expanded_flops(self, num_pairs: float, num_context: float) -> float:
        made = self.nope_head_dim + self.value_head_dim
        expanding = 2 * self.num_heads * self.kv_rank * made
        return num_pairs * self.flops_per_pair + num_context * expanding

    def tensors(self, hidden_size: int) -> Sizes:
        """Projections down to the latents and up from them, their biases and norms."""
        sizes: Sizes = {}
        if self.query_rank is None:
            sizes["q"] = (self.query_width, hidden_size)
        else:
            sizes["q_a"] = (self.query_rank, hidden_size)
            sizes["q_a_norm"] = (self.query_rank,)
            sizes["q_b"] = (self.query_width, self.query_rank)
            if self.qkv_bias:
                sizes["q_a_bias"] = (self.query_rank,)
        value_width = self.num_heads * self.value_head_dim
        key_width = self.num_heads * self.nope_head_dim
        sizes["kv_a"] = (self.cached_key_dim, hidden_size)
        if self.qkv_bias:
            sizes["kv_a_bias"] = (self.cached_key_dim,)
        sizes["kv_a_norm"] = (self.kv_rank,)
        sizes["kv_b"] = (key_width + value_width, self.kv_rank)
        sizes["o"] = (hidden_size, value_width)
        if self.output_bias:
            sizes["o_bias"] = (hidden_size,)
        return sizes

    @property
    def flops_per_pair(self) -> int:
        """Scores over heads of keys, sums over heads of values."""
        return 2 * self.num_heads * (self.head_dim + self.value_head_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        """Queries are brought into the space of the latents ("absorbed", DeepSeek-V2, section
        2.1.2), since making the keys and values of every cached position again for each token
        would cost far more. Bringing them there and back takes as much as the projections of the
        token's own keys and values, which the weights count."""
        return 2 * self.num_heads * (self.cached_key_dim + self.cached_value_dim)
