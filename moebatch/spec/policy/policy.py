"""The planner's answer: how large a pass is, what lives where, and what is computed where."""

from dataclasses import dataclass, fields
from math import ceil
from typing import Annotated, Literal, get_args

from moebatch.spec.files.values import one_of, real_number, whole_number
from moebatch.spec.machine.hardware import LEVELS, LevelName
from moebatch.spec.workload import Workload
from moebatch.units import count_of

PAGE_TOKENS = 16
"""Tokens of a page of keys and values: on average half a page per sequence is unused."""

STREAMING_SLOTS = 6
"""Enough for two readers and the compute to be apart; more bring nothing, three cost 5 %."""

Batching = Literal["mixed", "static"]
"""mixed: places of ended sequences are refilled, prompts come in slices beside decoding ones.
static: all prompts of a batch first, then its answers, then the next batch."""
CacheRule = Literal["static", "lru", "lfu", "lifo", "foreseen"]
"""Which experts stay where they are computed. static: the same ones throughout. Otherwise those
that have been computed, until another one of their layer takes their place; the rule says whose:
that whose last use is longest ago, that of the one used least often, that of the one that came
last. foreseen: an expert that needs a slot evicts the one, of any layer, that is least likely to
be chosen when its layer's turn comes."""
UNDIVIDED: frozenset[CacheRule] = frozenset({"static", "foreseen"})
"""Spread evenly over the layers, or shared by all of them."""
CACHE_RULES: tuple[CacheRule, ...] = get_args(CacheRule)
PredictorName = Literal["none", "correlation", "token", "next-gate", "learned"]
"""What says which experts come next. none: how often each was chosen so far; correlation: what was
chosen in the layers before (Klotski); token: what the token chose elsewhere; next-gate: what the
next layers' gates say of what this one sees (AdapMoE); learned: what a perceptron makes of the same
(ProMoE)."""
PREDICTORS: tuple[PredictorName, ...] = get_args(PredictorName)


MAX_SEQUENCES = 2**20
_MAX_TOKENS = 2**24
DEFAULT_SCHEDULE = "klotski"
MAX_SLOTS = 2**16
MAX_LAYERS = 2**12
_MAX_PAGES = 2**40
_ROUNDING = 1e-6
"""Half of eight layers is four, whatever floating point says."""


def whole(share: float, count: int) -> int:
    """As many whole things as a share of so many makes, rounded down."""
    return int(share * count + _ROUNDING)


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which share of something lives on each level, each from 0 to 1, 1 in all."""

    vram: Annotated[float, real_number(0, 1)] = 0.0
    dram: Annotated[float, real_number(0, 1)] = 0.0
    disk: Annotated[float, real_number(0, 1)] = 0.0

    def __post_init__(self) -> None:
        shares = (self.vram, self.dram, self.disk)
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares), f"shares are 0 to 1: {self}"
        assert abs(sum(shares) - 1) < 1e-6, f"shares must sum to 1: {self}"

    def on(self, level: str) -> float:
        """The share on the level of that name."""
        share: float = getattr(self, level)
        return share


def kv_levels(placement: Placement, num_layers: int) -> tuple[LevelName, ...]:
    """Home of the keys and values of each layer."""
    counts = kv_counts(placement, num_layers)
    return tuple(level for level, count in counts.items() for _ in range(count))


def kv_counts(placement: Placement, num_layers: int) -> dict[LevelName, int]:
    """Layers whose keys and values live on each level: the first ones in vram, then dram, then disk
    (Klotski). Shares are rounded down to whole layers; the lowest level that may hold any has the
    rest."""
    num_vram = whole(placement.vram, num_layers)
    num_dram = num_layers - num_vram
    if placement.disk * num_layers > _ROUNDING:
        num_dram = min(num_dram, whole(placement.dram, num_layers))
    num_disk = num_layers - num_vram - num_dram
    return {"vram": num_vram, "dram": num_dram, "disk": num_disk}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPolicy:
    """A policy in which details may be left open until the job is known: None is what suits it."""

    batch_size: Annotated[int, whole_number(1, MAX_SEQUENCES)]
    """Most sequences that are in work at once (N)."""
    micro_batch_size: Annotated[int, whole_number(1, MAX_SEQUENCES)]
    """Most sequences whose attention is computed together (mu)."""
    weights: Placement
    """Where the experts live (r_w and the shares below)."""
    kv_cache: Placement = Placement(dram=1.0)
    """Where keys and values live (r_c and the shares below)."""
    attention_on_gpu: bool = False
    """A_g."""
    ffn_on_gpu: bool = False
    """F_g."""
    schedule: str = DEFAULT_SCHEDULE
    staging: bool = False
    """Weights are copied into pinned buffers on their way to a GPU (FlexGen, MoE-Lightning);
    else they lie in memory that is pinned as a whole."""
    batching: Batching = "mixed"
    tokens_per_pass: Annotated[int | None, whole_number(1, _MAX_TOKENS)] = None
    """Most tokens of one pass: one of each decoding sequence, the rest slices of prompts. Left open
    with static batching, where it means nothing."""
    num_slots: Annotated[int | None, whole_number(0, MAX_SLOTS)] = None
    """Slots through which experts stream to where they are computed; 0 when none has to."""
    num_kv_pages: Annotated[int | None, whole_number(1, _MAX_PAGES)] = None
    """Pages of the cache of keys and values, on all levels together."""
    num_hot: Annotated[int | None, whole_number(0, MAX_SLOTS)] = None
    """Experts of a layer that come before its gates have chosen (K); None: as many as will probably
    be chosen."""
    cache: CacheRule = "static"
    """Which experts stay, as many as `weights` says."""
    cache_sizes: tuple[int, ...] = ()
    """How many of each MoE layer; empty is evenly."""
    streamed_layers: Annotated[int, whole_number(0, MAX_LAYERS)] = 0
    """Layers whose weights outside experts come up from the level below in each pass, beside those
    that stay where everything is computed."""
    predictor: Annotated[PredictorName | None, one_of(*PREDICTORS)] = None
    """What says which experts come next; None: the correlation table, if there is one."""

    @classmethod
    def of(cls, policy: "Policy") -> "OpenPolicy":
        """A policy with nothing left open. Micro-batches larger than the batch become as large."""
        values = {entry.name: getattr(policy, entry.name) for entry in fields(cls)}
        values["micro_batch_size"] = min(policy.micro_batch_size, policy.batch_size)
        if policy.batching == "static":
            del values["tokens_per_pass"]
        return cls(**values)

    @property
    def attends_beside_gpu(self) -> bool:
        """Whether the CPU attends for a GPU that computes the experts."""
        return self.ffn_on_gpu and not self.attention_on_gpu

    @property
    def streams_experts(self) -> bool:
        """Whether some experts do not live where they are computed."""
        return (self.weights.vram if self.ffn_on_gpu else self.weights.dram) < 1

    def resolve(self, workload: Workload, *, num_experts: int) -> "Policy":
        """The policy for a job on a model with so many experts in all its layers.

        What is open becomes: as many tokens of a pass as a job needs whose sequences begin and
        end steadily; a few slots if experts stream; pages for a batch of the longest sequences.
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["tokens_per_pass"] = self._tokens(workload)
        if self.num_slots is None:
            values["num_slots"] = min(STREAMING_SLOTS, num_experts) if self.streams_experts else 0
        if self.num_kv_pages is None:
            pages = self.batch_size * pages_of(workload.max_cached_tokens)
            values["num_kv_pages"] = max(1, pages)
        return Policy(**values)

    def _tokens(self, workload: Workload) -> int:
        if self.batching == "static":
            return self.batch_size
        if self.tokens_per_pass is not None:
            return self.tokens_per_pass
        prompts = workload.mean_prompt_tokens / max(1.0, workload.mean_new_tokens)
        return max(ceil(self.batch_size * (1 + prompts)), workload.fewest_pass_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy(OpenPolicy):
    """How a job is run on one machine. Nothing in it changes what is computed."""

    tokens_per_pass: int
    num_slots: int
    num_kv_pages: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_size", "tokens_per_pass", "num_kv_pages"):
            assert getattr(self, name) >= 1, f"{name} must be at least 1"
        assert self.batch_size <= self.tokens_per_pass, "every sequence needs room for one token"
        assert self.num_slots >= 0, "counts are not negative"
        assert self.num_hot is None or self.num_hot >= 0, "counts are not negative"
        assert all(size >= 0 for size in self.cache_sizes), "counts are not negative"
        assert self.cache not in UNDIVIDED or not self.cache_sizes, "layers have no sizes there"

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a full batch (M = N / mu)."""
        return -(-self.batch_size // self.micro_batch_size)

    @property
    def room(self) -> tuple[int, int, int]:
        """Sequences and tokens of a pass, and pages: all that decides how a job goes on."""
        return self.batch_size, self.tokens_per_pass, self.num_kv_pages

    def kv_levels(self, num_layers: int) -> tuple[LevelName, ...]:
        """Where keys and values of each layer live."""
        return kv_levels(self.kv_cache, num_layers)

    def __str__(self) -> str:
        return (
            f"up to {count_of(self.batch_size, 'sequence')}, "
            f"micro-batches of {self.micro_batch_size}, {self.tokens_per_pass} tokens a pass, "
            f"experts {shares_text(self.weights)}, {count_of(self.num_slots, 'slot')}, "
            f"{count_of(self.num_kv_pages, 'KV page')} {shares_text(self.kv_cache)}, "
            f"schedule {self.schedule}{self._layers_text()}{self._experts_text()}"
        )

    def _layers_text(self) -> str:
        count = self.streamed_layers
        return f", {count_of(count, 'layer')} streamed" if count else ""

    def _experts_text(self) -> str:
        sizes = f" of {' '.join(map(str, self.cache_sizes))}" if self.cache_sizes else ""
        cache = "" if self.cache == "static" else f", cache {self.cache}{sizes}"
        return cache if self.predictor is None else f"{cache}, predictor {self.predictor}"


def shares_text(placement: Placement) -> str:
    """``12 % dram, 88 % disk``: levels that hold something."""
    levels = (level for level in LEVELS if placement.on(level) > 5e-4)
    return ", ".join(f"{100 * placement.on(level):.3g} % {level}" for level in levels)
