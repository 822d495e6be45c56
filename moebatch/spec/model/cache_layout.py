"""What the cache holds of a token, and what a token sees of a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from moebatch.quoting import shown

CacheDtype = Literal["int8", "fp8"]
"""8 bits in which keys and values may be cached: whole numbers, or e4m3."""
KvCache = Literal["full", "int8", "fp8"]
"""How keys and values may be cached: in 8 bits, or as they are computed."""
StateDtype = Literal["float32", "float16"]
"""What numbers of the state of a recurrence may be kept as."""
StateCache = Literal["full", "float16"]
"""How states may be kept: in float32, or half of its bits."""
LARGEST_SLICE = 512
"""Most new tokens of a sequence that attend together."""
SCALE_BYTES = 2
"""A bfloat16 for each token and head; codes are made with the scale as it is stored."""
_FLOAT_BYTES: Mapping[StateDtype, int] = {"float32": 4, "float16": 2}
UNLIMITED = 2**50
"""More tokens than any sequence has."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """A tensor of the cache."""

    name: str
    num_heads: int
    head_dim: int
    dtype: CacheDtype | StateDtype | None = None
    """None is the dtype in which everything is computed."""

    @property
    def width(self) -> int:
        """Numbers of a token in one layer."""
        return self.num_heads * self.head_dim

    def head_bytes(self, compute_bytes: int) -> int:
        """Bytes of a token's numbers at one head, with their scale, where numbers that are computed
        with have so many."""
        match self.dtype:
            case None:
                return self.head_dim * compute_bytes
            case "float32" | "float16":
                return self.head_dim * _FLOAT_BYTES[self.dtype]
            case _:
                return self.head_dim + SCALE_BYTES

    def token_bytes(self, compute_bytes: int) -> int:
        """Bytes of a token in one layer."""
        return self.num_heads * self.head_bytes(compute_bytes)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the cache holds of every token in one layer."""

    parts: tuple[CachePart, ...]

    @classmethod
    @cache  # plans ask thousands of times
    def of_heads(cls, num_heads: int, head_dim: int, value_dim: int | None = None) -> "CacheLayout":
        """Keys and values of so many heads; values of that size, or of that of keys."""
        keys = CachePart("keys", num_heads, head_dim)
        return cls((keys, replace(keys, name="values", head_dim=value_dim or head_dim)))

    def cached_in(self, dtype: CacheDtype | None) -> "CacheLayout":
        """The same numbers in 8 bits, or None."""
        if dtype is None:
            return self
        return CacheLayout(tuple(replace(part, dtype=dtype) for part in self.parts))

    @property
    def width(self) -> int:
        """Numbers of a token in one layer."""
        return sum(part.width for part in self.parts)

    def token_bytes(self, compute_bytes: int) -> int:
        """Bytes of a token in one layer, where numbers that are computed with have so many."""
        return sum(part.token_bytes(compute_bytes) for part in self.parts)


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """What a token sees of a long sequence: the last tokens, and none or some of the first ones,
    which draw attention whatever they say (StreamingLLM: Xiao et al. 2023, section 3.2). Where
    there are such, positions are counted within what it sees, so that no distance is longer than
    that."""

    sinks: int
    """Tokens at the beginning of the sequence."""
    window: int
    """Last tokens, itself included."""

    @classmethod
    def parse(cls, text: str) -> "SinkWindow":
        """``4+1024`` is 4 sinks and a window of 1024. Raises ValueError for other text."""
        sinks, plus, window = text.partition("+")
        if not (plus and sinks.strip().isdecimal() and window.strip().isdecimal() and int(window)):
            raise ValueError(f"must be sinks and a window, such as 4+1024, got {shown(text)}")
        return cls(int(sinks), int(window))

    @property
    def num_seen(self) -> int:
        """Most tokens that one sees."""
        return self.sinks + self.window

    @property
    def most_cached(self) -> int:
        """Tokens of a sequence that are cached at once: what any of the largest slice sees."""
        return self.num_seen + LARGEST_SLICE - 1

    def num_skipped(self, num_before: int) -> int:
        """Tokens behind the sinks that the one after so many sees no more, nor later ones."""
        return max(0, num_before + 1 - self.num_seen)

    def __str__(self) -> str:
        return f"{self.sinks} sinks and a window of {self.window} tokens"
