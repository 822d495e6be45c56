"""Attention to a window, and to entries that stand for several tokens each (DeepSeek-V4)."""

from dataclasses import dataclass

from moebatch.spec.model.attention import Attention, Sizes
from moebatch.spec.model.cache_layout import CacheLayout, CachePart


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
    entries: Entries | None = None
    """Of what lies before; None where tokens see their window alone."""

    @property
    def positioned_dim(self) -> int:
        """The part that rotates."""
        return self.rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """All of that."""
        return self.rope_head_dim

    @property
    def rotated_from(self) -> int:
        """Behind what does not."""
        return self.head_dim - self.rope_head_dim

    @property
    def cached_parts(self) -> CacheLayout:
        """Keys."""
        return CacheLayout((CachePart("keys", 1, self.head_dim),))

    @property
    def entries_per_token(self) -> float:
        """One of so many."""
        return 0.0 if self.entries is None else 1 / self.entries.num_tokens

    @property
    def entry_width(self) -> int:
        """Numbers of a token that entries are made of."""
        return self.head_dim * (1 + (self.entries is not None and self.entries.overlap))

    @property
    def state(self) -> CacheLayout | None:
        """Entries, and what is projected of tokens that have none yet: what goes into sums, and
        what weighs it."""
        if self.entries is None:
            return None
        kept = CachePart("kept", self.entries.num_kept, 2 * self.entry_width)
        return CacheLayout((kept, CachePart("entries", self.entries.most, self.head_dim)))

    def tensors(self, hidden_size: int) -> Sizes:
        """Projections and their norms, sinks, and what entries are made with."""
        D, C, wide = hidden_size, self.head_dim, self.entry_width
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
        if self.entries is not None:
            sizes |= {
                "entry_value": (wide, D),
                "entry_weight": (wide, D),
                "entry_bias": (self.entries.num_tokens, wide),
                "entry_norm": (C,),
            }
        return sizes

    @property
    def exact_roles(self) -> frozenset[str]:
        """Norms, and what is added to weights of entries."""
        return frozenset(("q_a_norm", "key_norm", "entry_norm", "entry_bias", "sink_scores"))

    @property
    def flops_per_pair(self) -> int:
        """Scores and sums over the head of keys."""
        return 4 * self.query_width

    @property
    def decode_flops_per_pair(self) -> int:
        """As for prompts."""
        return self.flops_per_pair

    def step_rooms(self, num_rows: int, num_cached: int) -> tuple[int, ...]:
        """Compressed queries, with room to be normed in; queries, and the same in float32; keys,
        with room to be normed in; results, as they are and compressed; and what entries are made
        of, apart and together."""
        inner = self.output_groups * self.output_rank
        widths = (
            self.query_rank,
            2 * self.query_rank,
            self.query_width,
            2 * self.query_width,
            self.head_dim,
            2 * self.head_dim,
            self.query_width,
            inner,
            2 * self.entry_width,
            2 * self.entry_width,
        )
        return tuple(num_rows * width for width in widths)
