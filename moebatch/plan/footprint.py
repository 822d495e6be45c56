"""How many bytes a policy takes on each level, term by term."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from moebatch.plan.scratch import MAX_GEMM_ROWS, bucket_rows, limits_of, logits_rows, scratch_bytes
from moebatch.spec.hardware import LEVELS, Dtype, LevelName
from moebatch.spec.policy import PAGE_TOKENS, Policy, pages_of
from moebatch.spec.shape import ModelShape

KV_TERM = "keys and values"
KV_WINDOW_TERM = "keys and values in work"
RESIDENT_TERM = "resident experts"
LIBRARY_BYTES = 192 * 2**20
"""What the allocator cannot reuse and oneDNN keeps for its primitives, one for every row count and
shape; measured on jobs of many shapes. Its buffers grow with the matrices and come on top."""
READ_WINDOW_BYTES = 17 * 2**20
"""Window through which the weights outside experts are read."""
FLOAT_BYTES = 4
SAMPLING_BYTES = 64 * 2**20
"""What choosing tokens from a block of logits takes: a few rows at a time, in wider types."""
_BLOCK_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """How experts lie in their files, and what everything is computed in."""

    stored_bits: float
    """Bits per number of an expert: 16, 32, or what a quantisation takes with its scales."""
    compute: Dtype

    @property
    def compute_bytes(self) -> int:
        """Bytes per number of weights outside experts, activations, keys and values."""
        return FLOAT_BYTES if self.compute == "float32" else 2

    @property
    def converts(self) -> bool:
        """Whether experts are computed in other numbers than they are stored in."""
        return self.stored_bits != 8 * self.compute_bytes

    def expert_bytes(self, shape: ModelShape) -> int:
        """Bytes of one expert as it lies in its file."""
        return ceil(shape.expert_params * self.stored_bits / 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes at their peak, by what they are for."""

    terms: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All terms together."""
        return sum(self.terms.values())

    @property
    def largest(self) -> tuple[str, int]:
        """The largest term: where a change would help most."""
        return max(self.terms.items(), key=lambda term: term[1])


def footprints(
    shape: ModelShape,
    policy: Policy,
    *,
    dtypes: Dtypes,
    program_bytes: Mapping[LevelName, int],
    max_tokens: int,
    with_vram: bool = False,
) -> dict[LevelName, Footprint]:
    """Peak of every term under `policy`, by level.

    Shares of experts need not be whole experts here, so that all terms are affine in them.
    Experts on disk stay in the checkpoint and take no room of their own.

    Args:
        program_bytes: what the process holds on a level before any weight is loaded.
        max_tokens: longest sequence of the job, prompt and answer.
        with_vram: whether there is a GPU; weights outside experts and activations are then there.
    """
    terms: dict[LevelName, dict[str, float]] = {"vram": {}, "dram": {}, "disk": {}}
    library = _library_bytes(shape, policy, dtypes)
    for level, num_bytes in program_bytes.items():
        terms[level]["program and libraries"] = num_bytes + (level != "disk") * library
    main: LevelName = "vram" if with_vram else "dram"
    terms[main] |= {
        "weights outside experts": shape.resident_params * dtypes.compute_bytes + READ_WINDOW_BYTES,
        "activations": activation_bytes(shape, policy, dtypes, max_tokens=max_tokens),
    }
    if with_vram:
        terms["dram"]["activations"] = _host_bytes(shape, policy, dtypes, max_tokens=max_tokens)
    _add_experts(terms, shape, policy, dtypes, with_vram=with_vram)
    _add_cache(terms, shape, policy, dtypes, max_tokens=max_tokens)
    return {level: Footprint(terms=_whole(of_level)) for level, of_level in terms.items()}


def _host_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes, *, max_tokens: int) -> int:
    """What a CPU beside a GPU needs for what it computes: queries, new keys and values, and
    results of two micro-batches, or a whole step of the experts."""
    attention = 0
    if not policy.attention_on_gpu:
        width = 2 * shape.query_width + shape.cache_width
        attention = 2 * policy.micro_batch_size * width * dtypes.compute_bytes
    if policy.ffn_on_gpu:
        return attention
    return attention + activation_bytes(shape, policy, dtypes, max_tokens=max_tokens)


def _add_experts(
    terms: dict[LevelName, dict[str, float]],
    shape: ModelShape,
    policy: Policy,
    dtypes: Dtypes,
    *,
    with_vram: bool,
) -> None:
    slot = slot_bytes(shape, dtypes)
    num_experts = len(shape.moe_layers) * shape.num_experts
    terms["vram"][RESIDENT_TERM] = policy.weights.vram * num_experts * slot
    terms["dram"][RESIDENT_TERM] = policy.weights.dram * num_experts * slot
    computed: LevelName = "vram" if with_vram and policy.ffn_on_gpu else "dram"
    terms[computed]["expert slots"] = policy.num_slots * slot
    if computed == "vram" and policy.num_slots:
        # Pinned buffers on the way up; where experts come from disk, their window is there too.
        terms["dram"]["staging"] = policy.num_slots * slot


def _add_cache(
    terms: dict[LevelName, dict[str, float]],
    shape: ModelShape,
    policy: Policy,
    dtypes: Dtypes,
    *,
    max_tokens: int,
) -> None:
    cache = policy.num_kv_pages * kv_page_bytes(shape, dtypes)
    for level in LEVELS:
        terms[level][KV_TERM] = policy.kv_cache.on(level) * cache
    pages_in_work = min(policy.num_kv_pages, policy.micro_batch_size * pages_of(max_tokens))
    two_layers = 2 * pages_in_work * kv_page_bytes(shape, dtypes) / shape.num_layers
    if policy.attention_on_gpu:
        terms["vram"][KV_WINDOW_TERM] = two_layers * (1 - policy.kv_cache.vram)
    terms["dram"][KV_WINDOW_TERM] = two_layers * policy.kv_cache.disk


def _whole(terms: Mapping[str, float]) -> dict[str, int]:
    return {name: ceil(num_bytes) for name, num_bytes in terms.items() if num_bytes > 0}


def _library_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes) -> int:
    rows = min(policy.tokens_per_pass, MAX_GEMM_ROWS)
    widths = shape.hidden_size + max(shape.expert_width, shape.dense_width)
    return LIBRARY_BYTES + 2 * rows * widths * dtypes.compute_bytes


def slot_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Room of one expert as stored: each matrix may begin and end within a block of the file."""
    return dtypes.expert_bytes(shape) + 3 * 2 * _BLOCK_BYTES


def kv_page_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """One page of keys and values, over all layers."""
    return PAGE_TOKENS * shape.kv_bytes_per_token(dtypes.compute_bytes)


def activation_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes, *, max_tokens: int) -> int:
    """What a pass needs beside weights and cache, at its largest."""
    limits = limits_of(policy, max_tokens=max_tokens)
    scratch = scratch_bytes(shape, limits, dtypes.compute_bytes, converts=dtypes.converts)
    residual = 2 * policy.tokens_per_pass * shape.hidden_size * dtypes.compute_bytes
    rows_seen = 2 * limits.kv_rows * shape.num_heads * FLOAT_BYTES  # scores and masks
    num_rows = bucket_rows(logits_rows(shape, dtypes.compute_bytes))
    logits = 2 * num_rows * shape.vocab_size * dtypes.compute_bytes  # a block and the one before
    return scratch + residual + rows_seen + logits + SAMPLING_BYTES
