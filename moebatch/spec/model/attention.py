"""What attention of every kind says of itself: tensors, what it caches of a token, what it takes.

Shape letters: D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple

from moebatch.spec.model.cache_layout import CacheDtype, CacheLayout, SinkWindow

if TYPE_CHECKING:  # who reads a shape need not load numpy
    from moebatch.arrays import Ints

MOST_SCORES = 2**22
"""Scores of heads that lie in memory while tokens choose, unless one token has more."""
MOST_CHOOSING = 64
"""Tokens that choose together."""
LEARNT_SCALES = 3
"""Launches for a `LearntTemperature`, up to the queries that are multiplied."""
Sizes = dict[str, tuple[int, ...]]
OutputGate = Literal["none", "with queries", "apart", "of heads"]
GateOpening = Literal["sigmoid", "softplus"]


def halves_of_neighbours(rotary_dim: int, head_dim: int) -> list[int]:
    """The order of the numbers of a head, of which the first rotate in pairs of neighbours, that
    puts the first of each pair into one half of these, and the second into the other."""
    first, second = range(0, rotary_dim, 2), range(1, rotary_dim, 2)
    return [*first, *second, *range(rotary_dim, head_dim)]


def in_all_heads(num_heads: int, of_head: Sequence[int]) -> list[int]:
    """That order of the rows of one head in heads that follow each other."""
    starts = range(0, num_heads * len(of_head), len(of_head))
    return [start + row for start in starts for row in of_head]


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


SCORED = 12
"""Launches for attention with scores of its own for sinks, which no single operator knows."""


class AttentionLaunches(NamedTuple):
    """Kernels that torch launches on a GPU for a layer that attends. Left out are the norm before,
    what goes into the cache, gates of the output, and the projection behind."""

    projected: int
    """Products up to what is cached, and whatever else is done then."""
    norms: int
    """Of what is projected."""
    rotations: int
    """Of queries and keys together, as kernels know them."""
    group: int = 0
    """For sequences that decode, gathered together."""
    absorbed: int = 0
    """Of these before queries meet what is cached: they become such of latents."""
    brought_back: int = 0
    """And behind: sums of latents become values."""
    prompt_slice: int = 0
    sequence: float = 0.0
    """For each that is attended by itself, a slice of a prompt among them."""
    query_block: int = 0
    """For some of its queries."""
    results: int = 0
    """Norms of what heads put out."""
    reopening: int = 0
    """Products up to what opens gates of the output, beside a norm, where that is not what the
    layer sees and has been lost since."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by more the later they come: ``1 + strength * log(1 + floor(position /
    step))`` (Llama 4)."""

    step: int
    strength: float
    first: int = 1
    """What positions are counted from."""


@dataclass(frozen=True, slots=True)
class PowerTemperature:
    """The same by ``(1 + (position + 1) / step) ** exponent`` (Beam)."""

    step: int
    exponent: float


@dataclass(frozen=True, slots=True)
class LearntTemperature:
    """Those of a head are multiplied by ``bias + scale * log(1 + position)``, of which both are
    learnt (Mistral Large 4)."""

    @staticmethod
    def tensors(role: str, num_heads: int) -> Sizes:
        """Sizes of both, of as many heads."""
        return dict.fromkeys((f"{role}_scale", f"{role}_scale_bias"), (num_heads,))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSelector(ABC):
    """Chooses what a token attends to where it could see more."""

    num_heads: int
    """Those of its queries; all share the keys."""
    head_dim: int

    @property
    @abstractmethod
    def most_seen(self) -> int:
        """Tokens to which one attends at the most."""

    @abstractmethod
    def num_chosen(self, num_seen: "Ints") -> "Ints":
        """What tokens attend to that see so many, more than `most_seen` each."""

    @property
    @abstractmethod
    def together(self) -> int:
        """Tokens of a block, of which those that choose take all or none that they see; a token
        always takes the last one that it sees a part of."""

    @property
    def heads_choosing(self) -> int:
        """Heads of keys for each of which tokens choose by themselves; 1 is one choice for all."""
        return 1

    def num_scores(self, num_scored: int) -> int:
        """Of a token, all heads, where so many are scored."""
        return self.num_heads * num_scored

    def queries_at_once(self, num_scored: int) -> int:
        """Tokens of one sequence whose scores of so many lie in memory together."""
        return max(1, min(MOST_CHOOSING, MOST_SCORES // self.num_scores(num_scored)))


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
    temperature: Temperature | PowerTemperature | LearntTemperature | None = None
    """The last is for latents alone."""
    gate: OutputGate = "none"
    """Each number that attention puts out is weighed by a gate, whose projection lies with the
    queries' head by head, the query's rows before the gate's, and is of what these are made of; or
    apart; or all numbers of a head are weighed by one gate. Those that lie apart have no biases."""
    gate_opening: GateOpening = "sigmoid"
    """What its projection goes through."""
    has_gate_biases: bool = False
    """What all gates of a head go by grows by one learnt number, where they lie apart."""
    has_sink_scores: bool = False
    """Each head has a learnt score that takes part in its softmax and has no value. These are no
    tokens, unlike the sinks of a `SinkWindow`."""
    score_scale: float | None = None
    """By what scores are multiplied before their softmax; None is one by the root of a head's
    size."""
    cache_dtype: CacheDtype | None = None
    """8 bits in which a job has keys and values cached; None is the dtype of the computation."""
    sink_window: SinkWindow | None = None
    """What a job has tokens see in layers that see that much or more; None is all that they see."""
    indexer: TokenSelector | None = None
    """What chooses where more is cached than is attended to; None where all is."""

    @property
    def cache(self) -> CacheLayout:
        return self.cached_parts.cached_in(self.cache_dtype)

    @property
    def caches(self) -> tuple[CacheLayout, ...]:
        """The same, taken apart where layers that attend otherwise have some of it alone."""
        return (self.cache,)

    @property
    @abstractmethod
    def cached_parts(self) -> CacheLayout:
        """What is cached of a token, in whatever dtype."""

    @property
    @abstractmethod
    def launches(self) -> AttentionLaunches:
        """What plans count on a GPU; `tests/engine/test_launches.py` counts what is launched."""

    @abstractmethod
    def tensors(self, hidden_size: int) -> Sizes:
        """Sizes of the weights of a layer, by role."""

    @property
    @abstractmethod
    def flops_per_pair(self) -> int:
        """FLOP in one layer for a query and a position that it sees, scores and weighted sum,
        all heads: what prompt tokens take, whose keys and values lie there in full."""

    @property
    def decode_flops_per_pair(self) -> int:
        """The same for a decoding query over cached positions."""
        return self.flops_per_pair

    def expands(self, num_new: int, num_context: int) -> bool:
        """Whether a slice of so many new tokens attends to keys and values that are made anew of
        what is cached, its own and those of the context, rather than to what is cached."""
        return False

    def prompt_flops(self, num_pairs: float, num_context: float) -> float:
        """FLOP in one layer of tokens of prompts that see so many positions, all counted, and have
        so many before their slices, counted for each slice."""
        return num_pairs * self.flops_per_pair

    @property
    def selector(self) -> TokenSelector | None:
        """What chooses among tokens; None where each attends to all that it sees."""
        return self.indexer

    @property
    def most_chosen(self) -> int | None:
        """Tokens to which one attends at the most, where it chooses."""
        return self.selector.most_seen if self.selector else None

    @property
    def most_unscored(self) -> float:
        """Positions that a token sees at the most without choosing among them."""
        return inf

    @property
    def choosing_flops_per_pair(self) -> float:
        """FLOP in one layer for a token that chooses and one that it may choose."""
        return 0.0

    def choosing_bytes_per_pair(self, compute_bytes: int) -> float:
        """Bytes in one layer of the key by which it does so, where numbers that are computed with
        have so many."""
        return 0.0

    def within(self, max_tokens: int) -> "Attention":
        """The same for sequences of at most so many tokens: without what chooses, where all are
        chosen."""
        if self.selector is None or max_tokens > self.selector.most_seen:
            return self
        return replace(self, indexer=None)

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
    def products_by_head(self) -> int:
        """Products of rows with a matrix for each head, in one layer."""
        return 0

    @property
    def rotated_from(self) -> int:
        """Where in a head of keys, as they are cached, the numbers begin that have positions."""
        return 0

    @property
    def meeting_width(self) -> int:
        """Numbers of the queries of a token, as they meet what is cached."""
        return self.num_heads * self.cached_key_dim

    @property
    def sent_width(self) -> int:
        """Numbers of a token that attention takes where it has no weights: queries, and what the
        cache is to hold."""
        return self.meeting_width + self.cached_parts.width

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
    def entries_per_token(self) -> float:
        """What a token sees of each one before it that is not in its window."""
        return 0.0

    @property
    def exact_roles(self) -> frozenset[str]:
        """Tensors that are held in float32."""
        return frozenset()

    @property
    def state(self) -> CacheLayout | None:
        """What a layer keeps of a sequence beside what it caches of its tokens."""
        return None

    @property
    def output_gate(self) -> GateOpening | None:
        """How its input opens gates that weigh what attention puts out, where there are such."""
        return None if self.gate == "none" else self.gate_opening

    @property
    def gate_width(self) -> int:
        """Gates of a token, where there are such."""
        return self.num_heads if self.gate == "of heads" else self.result_width
