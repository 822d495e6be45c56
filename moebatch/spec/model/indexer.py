"""What chooses among many what a token attends to (DeepSeek-V3.2, section 2.1; DeepSeek-V4, section
2.3.1; GLM-5.3, where tokens are chosen in pools)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moebatch.spec.model.attention import (
    LEARNT_SCALES,
    MOST_CHOOSING,
    MOST_SCORES,
    LearntTemperature,
    Sizes,
    TokenSelector,
    halves_of_neighbours,
    in_all_heads,
)

if TYPE_CHECKING:  # who reads a shape need not load numpy
    from moebatch.arrays import Ints

_PROJECTED = 15
_SEEN = 12
"""A layer norm with a bias."""
_POOLING = 2
"""What weighs tokens in pools, beside their keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer(TokenSelector):
    """Chooses what a token attends to where it could see more. Everything before it, tokens or what
    stands for some of them, is scored by a key: the sum over heads of what is positive of query
    times key, weighed by what the token gives that head (DeepSeek-V3.2, Eq. 1)."""

    most: int
    """How many are chosen (``index_topk``)."""
    rotary_dim: int
    """Numbers of a head that rotate as those of the attention's keys do."""
    rotates_neighbours: bool = False
    """As in `Attention`."""
    rotates_last: bool = False
    """Numbers that rotate are the last ones of a head in files, not the first."""
    eps: float = 1e-6
    """Of its norms."""
    seen_width: int | None = None
    """Width of what the layer sees, where queries are made of that, through a layer norm, and not
    of compressed queries."""
    temperature: LearntTemperature | None = None
    """Of its queries."""
    is_shared: bool = False
    """A layer takes what the last one before has chosen that has an indexer of its own."""
    pool: int = 1
    """Tokens of a sequence that follow each other and are chosen together, by a mean of their keys:
    weighed channel by channel by a softmax over them of further projections, to which learnt
    numbers are added for each place. The last ones of a sequence are seen by all until they are as
    many."""

    @property
    def most_seen(self) -> int:
        """Those that are chosen, and such that have no pool yet."""
        return self.most + self.pool - 1

    def num_chosen(self, num_seen: "Ints") -> "Ints":
        return self.most + num_seen % self.pool

    @property
    def together(self) -> int:
        return self.pool

    @property
    def cached_width(self) -> int:
        """Numbers of a token by which it is chosen: a key, and what weighs it in its pool."""
        return self.head_dim * (1 + (self.pool > 1))

    def row_order(self, role: str) -> list[int] | None:
        """What rotates lies behind what does not, as halves, in whatever has the numbers of a
        head."""
        if not self.rotary_dim or not role.startswith(("index_q", "index_k")):
            return None
        if self.rotates_last and not self.rotates_neighbours:
            return None
        num_heads = self.num_heads if role == "index_q" else 1
        places = [*range(self.head_dim)]
        if not self.rotates_last:
            places = [*places[self.rotary_dim :], *places[: self.rotary_dim]]
        plain, rotating = places[: -self.rotary_dim], places[-self.rotary_dim :]
        if self.rotates_neighbours:
            order = halves_of_neighbours(self.rotary_dim, self.rotary_dim)
            rotating = [rotating[number] for number in order]
        return in_all_heads(num_heads, [*plain, *rotating])

    def tensors(self, hidden_size: int, query_rank: int | None) -> Sizes:
        """Queries from those that attention has compressed, or what it sees, and what weighs
        heads."""
        seen = self.seen_width or query_rank
        assert seen is not None, "an indexer takes compressed queries"
        sizes: Sizes = {
            "index_q": (self.num_heads * self.head_dim, seen),
            "index_weights": (self.num_heads, hidden_size),
        }
        if self.seen_width is not None:
            sizes |= dict.fromkeys(("index_seen_norm", "index_seen_norm_bias"), (seen,))
        if self.temperature is not None:
            sizes |= self.temperature.tensors("index", self.num_heads)
        return sizes

    def key_tensors(self, hidden_size: int) -> Sizes:
        """Keys of tokens, with a layer norm, and what weighs them in pools."""
        norm, wide = (self.head_dim,), (self.head_dim, hidden_size)
        sizes: Sizes = {"index_k": wide}
        if self.pool > 1:
            sizes |= {"index_pool_weight": wide, "index_pool_bias": (self.pool, self.head_dim)}
        return sizes | dict.fromkeys(("index_k_norm", "index_k_norm_bias"), norm)

    def key_rooms(self, num_rows: int) -> tuple[int, ...]:
        """Keys with room to be normed in, and with what weighs them beside them."""
        keys = num_rows * self.head_dim
        return (keys, 2 * keys, *((keys, 2 * keys) if self.pool > 1 else ()))

    def step_rooms(self, num_rows: int, num_scored: int) -> tuple[int, ...]:
        """Queries and weights of heads; scores, as they are; what queries are made of, as it is
        normed, and by what they are multiplied; and in float32 what is scored of a
        sequence, and of the tokens of it that choose together queries, weights and scores, by head
        and summed up."""
        heads, width = self.num_heads, self.num_heads * self.head_dim
        pairs = min(MOST_CHOOSING * num_scored, max(MOST_SCORES // heads, num_scored))
        floats = (
            num_scored * self.head_dim,
            MOST_CHOOSING * width,
            MOST_CHOOSING * heads,
            heads * pairs,
            pairs,
        )
        rounded, seen = heads * pairs, num_rows * (self.seen_width or 0)
        scales = num_rows * heads * (self.temperature is not None)
        pooled = self._pool_rooms(num_scored) if self.pool > 1 else ()
        others = (num_rows * width, num_rows * heads, rounded, seen, 2 * seen, scales)
        return (*others, *pooled, *(2 * room for room in floats))

    def _pool_rooms(self, num_tokens: int) -> tuple[int, ...]:
        """Shares of tokens in float32, and of pools what is summed of them, and keys."""
        shares, keys = num_tokens * self.head_dim, num_tokens // self.pool * self.head_dim
        return (2 * shares, 2 * keys, keys)

    @property
    def launches(self) -> int:
        """Those of queries, of what weighs heads, and of keys through a layer norm, but for
        rotations."""
        of_seen = _SEEN * (self.seen_width is not None)
        pools = _POOLING * (self.pool > 1)
        return _PROJECTED + pools + of_seen + LEARNT_SCALES * (self.temperature is not None)

    @property
    def flops_per_pair(self) -> int:
        """FLOP in one layer for a token that chooses and one that it may choose, or a pool."""
        return 2 * self.num_heads * (self.head_dim + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockIndexer(TokenSelector):
    """Chooses blocks of tokens that follow each other, for each head of keys by itself: those with
    the largest product of a query of that head and a key of one of their tokens (MiniMax-M3). The
    first numbers of a head rotate, as those of the attention do."""

    num_blocks: int
    """How many are chosen, that of the token itself among them (``index_topk_blocks``)."""
    block_tokens: int
    """Tokens of a block (``index_block_size``)."""
    num_last: int
    """Last blocks that are chosen whatever their score (``index_local_blocks``)."""

    @property
    def most_seen(self) -> int:
        return self.num_blocks * self.block_tokens

    def num_chosen(self, num_seen: "Ints") -> "Ints":
        """Of the last block what they see."""
        return self.most_seen - (-num_seen) % self.block_tokens

    @property
    def together(self) -> int:
        return self.block_tokens

    @property
    def heads_choosing(self) -> int:
        """As many as the attention has of keys."""
        return self.num_heads

    def tensors(self, hidden_size: int) -> Sizes:
        """Queries and keys of hidden states, each with a norm of its heads."""
        return {
            "index_q": (self.num_heads * self.head_dim, hidden_size),
            "index_q_norm": (self.head_dim,),
            "index_k": (self.head_dim, hidden_size),
            "index_k_norm": (self.head_dim,),
        }

    def num_scores(self, num_scored: int) -> int:
        """Of a token, those behind the last position of the last block among them."""
        return self.num_heads * -(-num_scored // self.block_tokens) * self.block_tokens

    def step_rooms(self, num_rows: int, num_scored: int) -> tuple[int, ...]:
        """Queries and keys, with room to be normed in; and in float32 what is scored of a sequence,
        and of the tokens of it that choose together queries, scores, and those of blocks."""
        width, scores = self.num_heads * self.head_dim, self.num_scores(num_scored)
        pairs = min(MOST_CHOOSING * scores, max(MOST_SCORES, scores))
        floats = (
            num_scored * self.head_dim,
            MOST_CHOOSING * width,
            pairs,
            -(-pairs // self.block_tokens),
        )
        projected = (num_rows * width, num_rows * self.head_dim)
        return (*projected, *(2 * room for room in (*projected, *floats)))

    @property
    def flops_per_pair(self) -> int:
        """FLOP in one layer for a token that chooses and one that it may choose."""
        return 2 * self.num_heads * self.head_dim
