"""The planner's answer: how large a pass is and what lives where."""

from dataclasses import dataclass

PAGE_TOKENS = 16
"""Tokens of a page of keys and values: on average half a page per sequence is unused."""


def pages_of(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a job is run on one machine. Nothing in it changes what is computed."""

    batch_size: int
    """Most sequences that are in work at once (N)."""
    micro_batch_size: int
    """Most sequences whose attention is computed together (mu)."""
    tokens_per_pass: int
    """Most tokens of one pass: one of each decoding sequence, the rest slices of prompts."""
    num_slots: int
    """Slots through which experts stream; 0 when all of them are resident."""
    num_resident: int
    """Experts that stay in memory."""
    num_kv_pages: int
    """Pages of the cache of keys and values."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_size", "tokens_per_pass", "num_kv_pages"):
            assert getattr(self, name) >= 1, f"{name} must be at least 1"
        assert self.batch_size <= self.tokens_per_pass, "every sequence needs room for one token"
        assert self.num_slots >= 0 and self.num_resident >= 0, "counts are not negative"

    def __str__(self) -> str:
        experts = f"{self.num_resident} experts resident, {self.num_slots} slots"
        return (
            f"up to {self.batch_size} sequences, micro-batches of {self.micro_batch_size}, "
            f"{self.tokens_per_pass} tokens a pass, "
            f"{experts if self.num_slots else 'all experts resident'}, "
            f"{self.num_kv_pages} KV pages"
        )
