"""Attention whose keys and values are compressed."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
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
    def cache_width(self) -> int:
        """Numbers that the cache holds of a token in one layer."""
        return self.kv_rank + self.rope_head_dim
