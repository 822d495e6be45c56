"""Attention to a window, and to entries that stand for several tokens each (DeepSeek-V4)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from moebatch.spec.model.attention import Attention, AttentionLaunches, Sizes
from moebatch.spec.model.cache_layout import CacheLayout, CachePart
from moebatch.spec.model.indexer import Indexer

_SCORES = 2**20
"""Scores of heads that lie in memory at a time, unless one query has more."""
QUERY_BLOCK = 16
"""Tokens of a slice of a prompt that attend together at the most."""
_PROJECTED = 25
"""Launches: products, rotations there and back, and the groups of its output."""
_OF_ENTRIES = 4
"""What these are made of, projected."""
_SEEN = 5
"""By tokens of a sequence: rows, gathered."""
_ENTRIES_SEEN = 6
"""Entries beside these, and what they are made of kept."""
_ENTRY_MADE = 20
_BLOCK = 18
"""Scores, masked, softmax, and what is summed."""
_ENTRIES_MASKED = 5
_OF_INDEXER = 10
"""Queries, rotated, and what weighs heads."""
_CHOSEN = 10
"""Entries are scored, and those that are not chosen are masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """What stands for tokens of a sequence, so many for each: a mean of what is projected of them,
    weighed channel by channel by a softmax of other projections (DeepSeek-V4, section 2.3)."""

    num_tokens: int
    """Of one, which follow each other; the last ones of a sequence have none until they are as
    many."""
    most: int
    """Entries of the longest sequence."""
    overlap: bool = False
    """An entry stands for the tokens of the one before it as well, in projections of their own."""

    @property
    def num_kept(self) -> int:
        """Tokens whose projections are kept until an entry is made of them."""
        return self.num_tokens * (1 + self.overlap)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention(Attention):
    """One head of keys, which are their own values. The last numbers of a head rotate, and what is
    summed of them is rotated back."""

    query_rank: int
    """Width of compressed queries."""
    rope_head_dim: int
    """Numbers of a head that rotate, in pairs of neighbours."""
    output_groups: int
    """Groups of heads whose results are compressed each by itself."""
    output_rank: int
    """Width of what is made of the results of a group."""
    has_sink_scores: bool = True
    entries: Entries | None = None
    """Of what lies before; None where tokens see their window alone."""
    indexer: Indexer | None = None
    """What chooses among entries, by keys that are entries of the same tokens as well, made with
    weights of their own; None where all are seen."""

    def within(self, max_tokens: int) -> "CompressedAttention":
        """With room for the entries of so many tokens, and without what chooses among as few."""
        if self.entries is None:
            return self
        most, indexer = max(1, max_tokens // self.entries.num_tokens), self.indexer
        if indexer is not None and most <= indexer.most:
            indexer = None
        return replace(self, entries=replace(self.entries, most=most), indexer=indexer)

    @property
    def selector(self) -> None:
        """It chooses among entries, not among tokens."""

    @property
    def positioned_dim(self) -> int:
        return self.rope_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_head_dim

    @property
    def rotated_from(self) -> int:
        """Behind what does not."""
        return self.head_dim - self.rope_head_dim

    @property
    def cached_parts(self) -> CacheLayout:
        return CacheLayout((CachePart("keys", 1, self.head_dim),))

    @property
    def launches(self) -> AttentionLaunches:
        """Sequences attend one after the other, some of their tokens at a time."""
        own = AttentionLaunches(_PROJECTED, 3, 0, sequence=_SEEN, query_block=_BLOCK)
        if self.entries is None:
            return own
        kinds, chooses = len(self.kinds_of_entries), self.indexer is not None
        return own._replace(
            projected=_PROJECTED + kinds * _OF_ENTRIES + chooses * _OF_INDEXER,
            sequence=_SEEN + kinds * (_ENTRIES_SEEN + _ENTRY_MADE / self.entries.num_tokens),
            query_block=_BLOCK + _ENTRIES_MASKED + chooses * _CHOSEN,
        )

    @property
    def entries_per_token(self) -> float:
        return 0.0 if self.entries is None else 1 / self.entries.num_tokens

    @property
    def choosing_flops_per_pair(self) -> float:
        """The indexer's, of a token's share in an entry."""
        return self.indexer.flops_per_pair * self.entries_per_token if self.indexer else 0.0

    @property
    def most_unscored(self) -> float:
        """Those of as many entries as are chosen."""
        return self.indexer.most / self.entries_per_token if self.indexer else inf

    def choosing_bytes_per_pair(self, compute_bytes: int) -> float:
        """A token's share in an entry to choose by."""
        width = self.indexer.head_dim if self.indexer else 0
        return width * compute_bytes * self.entries_per_token

    @property
    def num_seen(self) -> int:
        """Entries of the longest sequence."""
        return self.entries.most if self.entries else 0

    @property
    def kinds_of_entries(self) -> Mapping[str, int]:
        """Those that are made of a sequence and the size of one: what is attended to, and keys by
        which an indexer chooses among these."""
        if self.entries is None:
            return {}
        own = {"entry": self.head_dim}
        return own | {"index_entry": self.indexer.head_dim} if self.indexer else own

    def width_of(self, size: int) -> int:
        """Numbers of a token that entries of that size are made of."""
        return size * (1 + (self.entries is not None and self.entries.overlap))

    @property
    def state(self) -> CacheLayout | None:
        """Of each kind entries, and what is projected of tokens that have none yet: what goes into
        sums, and what weighs it."""
        if self.entries is None:
            return None
        parts = list[CachePart]()
        for kind, size in self.kinds_of_entries.items():
            parts.append(CachePart(f"kept_{kind}", self.entries.num_kept, 2 * self.width_of(size)))
            parts.append(CachePart(kind, self.entries.most, size))
        return CacheLayout(tuple(parts))

    def tensors(self, hidden_size: int) -> Sizes:
        """Projections and their norms, sinks, and what entries are made with."""
        D, C = hidden_size, self.head_dim
        grouped = self.query_width // self.output_groups
        inner = self.output_groups * self.output_rank
        sizes: Sizes = {
            "q_a": (self.query_rank, D),
            "q_a_norm": (self.query_rank,),
            "q_b": (self.query_width, self.query_rank),
            "key": (C, D),
            "key_norm": (C,),
            "o_a": (inner, grouped),
            "o": (D, inner),
            "sink_scores": (self.num_heads,),
        }
        for kind, size in self.kinds_of_entries.items():
            assert self.entries is not None, "there are some"
            wide = self.width_of(size)
            sizes |= {
                f"{kind}_value": (wide, D),
                f"{kind}_weight": (wide, D),
                f"{kind}_bias": (self.entries.num_tokens, wide),
                f"{kind}_norm": (size,),
            }
        return sizes | (self.indexer.tensors(D, self.query_rank) if self.indexer else {})

    @property
    def exact_roles(self) -> frozenset[str]:
        """Norms, and what is added to weights of entries."""
        of_entries = ("entry_norm", "entry_bias", "index_entry_norm", "index_entry_bias")
        return frozenset(("q_a_norm", "key_norm", "sink_scores", *of_entries))

    @property
    def flops_per_pair(self) -> int:
        return 4 * self.query_width

    def step_rooms(self, num_rows: int, num_cached: int) -> tuple[int, ...]:
        """Compressed queries, with room to be normed in; queries, and the same in float32; keys,
        with room to be normed in; results, as they are and compressed; what entries are made of,
        apart and together; and scores, as they are and in float32, with what chooses."""
        inner = self.output_groups * self.output_rank
        widths = [
            self.query_rank,
            2 * self.query_rank,
            self.query_width,
            2 * self.query_width,
            self.head_dim,
            2 * self.head_dim,
            self.query_width,
            inner,
        ]
        for size in self.kinds_of_entries.values():
            widths.extend(2 * [2 * self.width_of(size)])
        num_seen = num_cached + self.num_seen
        scores = self.num_heads * self.queries_at_once(num_seen) * num_seen
        choosing: tuple[int, ...] = ()
        if self.indexer is not None:
            choosing = self.indexer.step_rooms(num_rows, self.num_seen)
        return (*(num_rows * width for width in widths), scores, 2 * scores, *choosing)

    def queries_at_once(self, num_seen: int) -> int:
        """Queries of a sequence whose scores of so many lie in memory together."""
        most = QUERY_BLOCK if self.indexer is None else self.indexer.queries_at_once(num_seen)
        return max(1, min(QUERY_BLOCK, most, _SCORES // (self.num_heads * num_seen)))
