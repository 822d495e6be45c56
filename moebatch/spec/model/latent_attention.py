"""Multi-head latent attention (DeepSeek-V2, section 2.1)."""

from dataclasses import dataclass
from math import inf

from moebatch.spec.model.attention import (
    LEARNT_SCALES,
    SCORED,
    Attention,
    AttentionLaunches,
    LearntTemperature,
    Sizes,
    halves_of_neighbours,
    in_all_heads,
    rows_by_part,
)
from moebatch.spec.model.cache_layout import CacheLayout, CachePart
from moebatch.spec.model.indexer import Indexer

_EXPANDED_NUMBERS = 2**24
"""Keys and values that are made of latents at a time, unless those of one head are more."""
_ALIGNMENT = 64
"""Numbers between two temporaries, at the most."""
_ABSORBED = 2
"""Launches: queries are brought to latents, and the part with positions behind them."""
_BROUGHT_BACK = 1
_GROUP = 4 + _ABSORBED + _BROUGHT_BACK
"""Queries and latents are gathered, meet, and results are put back."""
_JOINED = 2
"""Compressed queries are kept as they are, and as they are normed."""
_INDEX_KEYS = 2
"""Those of a sequence, gathered."""
_CHOSEN = 11
"""Positions are scored, and the best ones kept."""
_POOLED = 10
"""Keys of a sequence, to such of pools."""
_POOLS_CHOSEN = 10
"""The pool that is not full is taken as well, and of it what a token sees."""
_ROWS_OF_CHOSEN = 2
_PLANNED = 7
"""Tokens that have chosen are laid out to attend together."""
_PROMPT_SLICE = 4
"""Attention; before, latents are gathered, and the rotated key goes to all heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads are
    made of one compressed vector per token, and that alone is cached."""

    kv_rank: int
    """Width of the compressed keys and values (``kv_lora_rank``)."""
    query_rank: int | None
    """Width of compressed queries (``q_lora_rank``); None where queries are not compressed."""
    rope_head_dim: int
    """Part of a query's and a key's head that has positions; the key's is one for all heads. 0 is
    none: nothing is cached but latents."""
    value_head_dim: int
    """Size of a head of values; ``head_dim`` is that of queries and keys."""
    joins_compressed: bool = False
    """Queries, and gates that lie with them, are made of compressed queries as they are normed and,
    behind that, as they are (A.X-K2)."""
    norm_eps: float = 1e-6
    """Of the norms of compressed queries and latents."""
    latent_scale: float = 1.0
    """By what normed latents are multiplied (LongCat-Flash)."""
    norms_positioned: bool = False
    """The part of keys that has positions is normed as well, before it rotates (dots3)."""
    indexer: Indexer | None = None
    rotates: bool = True
    """The part beside latents does. Where it does not, tokens are told from each other by what they
    see alone, and that part of keys is one for all heads all the same."""

    @property
    def positioned_dim(self) -> int:
        """The part beside the one that latents are for."""
        return self.rope_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_head_dim if self.rotates else 0

    def row_order(self, role: str) -> list[int] | None:
        """Keys of all heads before their values; halves of what rotates, behind what does not."""
        if self.indexer is not None and (order := self.indexer.row_order(role)) is not None:
            return order
        plain, rope = self.nope_head_dim, self.rope_head_dim
        if role == "k_rope_norm" and self.rotates_neighbours:
            return halves_of_neighbours(rope, rope)
        if role == "kv_b":
            return rows_by_part(self.num_heads, (plain, self.value_head_dim))
        if role == "gated_q_b":
            return self._gated_row_order
        widths = {"q": plain, "q_b": plain, "kv_a": self.kv_rank, "kv_a_bias": self.kv_rank}
        if role not in widths or not self.rotates_neighbours:
            return None
        before, num_heads = widths[role], 1 if role.startswith("kv_a") else self.num_heads
        rotating = (before + row for row in halves_of_neighbours(rope, rope))
        return in_all_heads(num_heads, [*range(before), *rotating])

    @property
    def _gated_row_order(self) -> list[int]:
        """Queries of all heads before their gates."""
        order = rows_by_part(self.num_heads, (self.head_dim, self.value_head_dim))
        queries = self.row_order("q")
        if queries is None:
            return order
        return [*(order[row] for row in queries), *order[self.query_width :]]

    @property
    def cached_parts(self) -> CacheLayout:
        """Latents, and behind each the part of the keys that has positions: one head of keys, of
        which the latents are the values. Where tokens choose anew, keys for that as well."""
        latents = CachePart("latents", 1, self.kv_rank + self.rope_head_dim)
        if self.own_indexer is None:
            return CacheLayout((latents,))
        return CacheLayout((latents, CachePart("index keys", 1, self.own_indexer.cached_width)))

    @property
    def caches(self) -> tuple[CacheLayout, ...]:
        """Layers that share choices have the same latents, and no keys to choose by."""
        return tuple(CacheLayout((part,)) for part in self.cache.parts)

    @property
    def own_indexer(self) -> Indexer | None:
        """The one whose weights and keys a layer has, if it does not take what another one has
        chosen."""
        return None if self.indexer is None or self.indexer.is_shared else self.indexer

    @property
    def most_unscored(self) -> float:
        return self.own_indexer.most if self.own_indexer else inf

    @property
    def choosing_flops_per_pair(self) -> float:
        """The indexer's, of a token's share in what is scored."""
        return self.own_indexer.flops_per_pair / self.own_indexer.pool if self.own_indexer else 0.0

    def choosing_bytes_per_pair(self, compute_bytes: int) -> float:
        """What is cached behind latents."""
        return sum(part.token_bytes(compute_bytes) for part in self.cache.parts[1:])

    @property
    def launches(self) -> AttentionLaunches:
        """Those of prompts have keys and values of all heads made anew."""
        compresses, scored = self.query_rank is not None, SCORED * self.has_sink_scores
        chooses, is_own = self.indexer is not None, self.own_indexer is not None
        pools = self.own_indexer is not None and self.own_indexer.pool > 1
        return AttentionLaunches(
            projected=2
            + compresses
            + _JOINED * self.joins_compressed
            + (self.latent_scale != 1)
            + (LEARNT_SCALES if self.learns_temperature else 0)
            + (self.own_indexer.launches if self.own_indexer else 0),
            norms=1 + compresses + self.norms_positioned,
            rotations=(self.rotary_dim > 0) + (is_own and self.rotary_dim > 0),
            group=_GROUP + scored + chooses * _PLANNED,
            absorbed=_ABSORBED,
            brought_back=_BROUGHT_BACK,
            prompt_slice=_PROMPT_SLICE + 2 * self.num_heads + scored,
            sequence=chooses * _ROWS_OF_CHOSEN + is_own * _INDEX_KEYS + pools * _POOLED,
            query_block=is_own * _CHOSEN + pools * _POOLS_CHOSEN,
            reopening=(1 + _JOINED * self.joins_compressed) * (self.gate == "with queries"),
        )

    @property
    def nope_head_dim(self) -> int:
        """Part of a query's and a key's head that has no positions."""
        return self.head_dim - self.rope_head_dim

    @property
    def cached_key_dim(self) -> int:
        return self.kv_rank + self.rope_head_dim

    @property
    def cached_value_dim(self) -> int:
        return self.kv_rank

    @property
    def products_by_head(self) -> int:
        """Queries become such of latents, and sums of latents values."""
        return 2

    @property
    def rotated_from(self) -> int:
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
            2 * (self.query_rank or 0) * self.joins_compressed,
            self.cached_key_dim,
            2 * max(self.kv_rank, self.rope_head_dim * self.norms_positioned),
            self.query_width,
            heads * self.cached_key_dim,
            heads * self.cached_value_dim,
            heads * self.value_head_dim,
        )
        scales = num_rows * heads * self.learns_temperature
        choosing: tuple[int, ...] = ()
        if (indexer := self.own_indexer) is not None:
            choosing = (*indexer.key_rooms(num_rows), *indexer.step_rooms(num_rows, num_cached))
        in_rows = (num_rows * width for width in of_row)
        return (*in_rows, scales, expanded + _ALIGNMENT, *choosing)

    def expands(self, num_new: int, num_context: int) -> bool:
        """Where that takes fewer operations. Those of new tokens cost as much as bringing their
        queries to the latents and the results back; those of the context are made once for all new
        tokens, whose scores and sums are then cheaper."""
        num_pairs = num_new * num_context + num_new * (num_new + 1) // 2
        as_cached = num_pairs * self.decode_flops_per_pair
        return num_new > 1 and self._expanded_flops(num_pairs, num_context) < as_cached

    def prompt_flops(self, num_pairs: float, num_context: float) -> float:
        as_cached = num_pairs * self.decode_flops_per_pair
        return min(as_cached, self._expanded_flops(num_pairs, num_context))

    def _expanded_flops(self, num_pairs: float, num_context: float) -> float:
        made = self.nope_head_dim + self.value_head_dim
        expanding = 2 * self.num_heads * self.kv_rank * made
        return num_pairs * self.flops_per_pair + num_context * expanding

    def tensors(self, hidden_size: int) -> Sizes:
        """Projections down to the latents and up from them, their biases and norms."""
        sizes: Sizes = {}
        seen, role = hidden_size, "q"
        if self.query_rank is not None:
            sizes["q_a"] = (self.query_rank, hidden_size)
            sizes["q_a_norm"] = (self.query_rank,)
            seen, role = self.query_rank * (1 + self.joins_compressed), "q_b"
            if self.qkv_bias:
                sizes["q_a_bias"] = (self.query_rank,)
        if self.gate == "with queries":
            sizes["gated_q_b"] = (self.query_width + self.gate_width, seen)
        else:
            sizes[role] = (self.query_width, seen)
        value_width = self.num_heads * self.value_head_dim
        key_width = self.num_heads * self.nope_head_dim
        if isinstance(self.temperature, LearntTemperature):
            sizes |= self.temperature.tensors("query", self.num_heads)
        sizes["kv_a"] = (self.cached_key_dim, hidden_size)
        if self.qkv_bias:
            sizes["kv_a_bias"] = (self.cached_key_dim,)
        sizes["kv_a_norm"] = (self.kv_rank,)
        if self.norms_positioned:
            sizes["k_rope_norm"] = (self.rope_head_dim,)
        sizes["kv_b"] = (key_width + value_width, self.kv_rank)
        if self.gate not in ("none", "with queries"):
            sizes["output_gate"] = (self.gate_width, hidden_size)
        if self.has_sink_scores:
            sizes["sink_scores"] = (self.num_heads,)
        sizes["o"] = (hidden_size, value_width)
        if self.output_bias:
            sizes["o_bias"] = (hidden_size,)
        if (indexer := self.own_indexer) is not None:
            sizes |= indexer.tensors(hidden_size, self.query_rank)
            sizes |= indexer.key_tensors(hidden_size)
        return sizes

    @property
    def learns_temperature(self) -> bool:
        """Whether queries are multiplied by what is learnt."""
        return isinstance(self.temperature, LearntTemperature)

    @property
    def gate_width(self) -> int:
        """Of values, and not of sums of latents."""
        return self.num_heads * (1 if self.gate == "of heads" else self.value_head_dim)

    @property
    def exact_roles(self) -> frozenset[str]:
        """Scores without a value, as transformers holds them."""
        return frozenset(("sink_scores",))

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
