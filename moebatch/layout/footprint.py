"""How many bytes a policy takes on each level, term by term."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from moebatch.formats.weight_format import WeightFormat
from moebatch.layout.division import Division, computing_level
from moebatch.layout.scratch import (
    attention_core_elements,
    bucket_rows,
    gemm_rows,
    limits_of,
    logits_rows,
    scratch_bytes,
)
from moebatch.schedule.attention import LOOK_AHEAD
from moebatch.schedule.kv import NUM_WINDOWS
from moebatch.schedule.kv_route import Place, windows
from moebatch.spec.hardware import LEVELS, Dtype, LevelName
from moebatch.spec.policy import PAGE_TOKENS, Policy, pages_of
from moebatch.spec.shape import ModelShape

KV_TERM = "keys and values"
KV_WINDOW_TERM = "keys and values in work"
RESIDENT_TERM = "resident experts"
SLOTS_TERM = "expert slots"
SPARE_TERM = "what rounding to whole layers and experts brings down"
LIBRARY_BYTES = 192 * 2**20
"""What the allocator cannot reuse and oneDNN keeps for its primitives, one for every row count and
shape; measured on jobs of many shapes. Its buffers grow with the matrices and come on top."""
READ_WINDOW_BYTES = 17 * 2**20
"""Window through which the weights outside experts are read."""
FLOAT_BYTES = 4
SAMPLING_BYTES = 64 * 2**20
"""What choosing tokens from a block of logits takes: a few rows at a time, in wider types."""
_BLOCK_BYTES = 4096
_NUM_MATRICES = 3
_PACKED_ALIGNMENT = 256
_PAGES_GAP_BYTES = 2**20
"""What the gaps between pages take in a staging buffer."""
_ROOM_OF_TENSOR = 64
_TENSORS_PER_LAYER = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """How experts lie in their files, and what everything is computed in."""

    stored: WeightFormat
    compute: Dtype

    @property
    def compute_bytes(self) -> int:
        """Bytes per number of weights outside experts, activations, keys and values."""
        return FLOAT_BYTES if self.compute == "float32" else 2

    @property
    def converts(self) -> bool:
        """Whether experts are computed in other numbers than they are stored in."""
        return not self.stored.is_computed_in(self.compute)

    def expert_bytes(self, shape: ModelShape) -> int:
        """Bytes of one expert as it lies in its file."""
        return shape.expert_bytes(self.stored)


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
    is_staged: bool = False,
    division: Division | None = None,
) -> dict[LevelName, Footprint]:
    """Peak of every term under `policy`, by level.

    Experts on disk stay in the checkpoint and take no room of their own.

    Args:
        program_bytes: what the process holds on a level before any weight is loaded.
        max_tokens: longest sequence of the job, prompt and answer.
        with_vram: whether there is a GPU; weights outside experts and activations are then there.
        is_staged: whether pages are copied into pinned buffers on their way up.
        division: how shares become experts and layers; None is as a run has them.
    """
    if division is None:
        division = Division.of(shape, policy, with_vram=with_vram)
    terms: dict[LevelName, dict[str, float]] = {"vram": {}, "dram": {}, "disk": {}}
    library = _library_bytes(shape, policy, dtypes)
    for level, num_bytes in program_bytes.items():
        terms[level]["program and libraries"] = num_bytes + (level != "disk") * library
    activations = activation_bytes(shape, policy, dtypes, max_tokens=max_tokens)
    if with_vram:
        terms["vram"]["weights outside experts"] = dense_bytes(shape, dtypes)
        terms["vram"]["activations"] = activations
        terms["dram"]["reading"] = READ_WINDOW_BYTES
        terms["dram"]["activations"] = _host_bytes(shape, policy, dtypes, max_tokens=max_tokens)
        if not policy.attention_on_gpu:
            for level in ("vram", "dram"):
                terms[level]["projections"] = exchange_bytes(shape, policy, dtypes)
    else:
        dense = dense_bytes(shape, dtypes) + READ_WINDOW_BYTES
        terms["dram"] |= {"weights outside experts": dense, "activations": activations}
    _add_experts(terms, shape, policy, dtypes, division, with_vram=with_vram, is_staged=is_staged)
    _add_cache(terms, shape, policy, dtypes, division, max_tokens=max_tokens, with_vram=with_vram)
    return {level: Footprint(terms=_whole(of_level)) for level, of_level in terms.items()}


def _host_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes, *, max_tokens: int) -> int:
    """What main memory beside a GPU needs for what is computed there: tokens are chosen from
    logits, decoding sequences attend where the policy says so, and experts likewise."""
    if not policy.ffn_on_gpu:
        return activation_bytes(shape, policy, dtypes, max_tokens=max_tokens)
    num_bytes = _logits_bytes(shape, dtypes) + SAMPLING_BYTES
    if policy.attention_on_gpu:
        return num_bytes
    limits = limits_of(policy, max_tokens=max_tokens)
    core = attention_core_elements(shape, limits) * dtypes.compute_bytes
    return num_bytes + core + 2 * limits.kv_rows * shape.num_heads * FLOAT_BYTES


def _add_experts(
    terms: dict[LevelName, dict[str, float]],
    shape: ModelShape,
    policy: Policy,
    dtypes: Dtypes,
    division: Division,
    *,
    with_vram: bool,
    is_staged: bool,
) -> None:
    computed = computing_level(policy, with_vram=with_vram)
    slot: dict[LevelName, int] = {
        "vram": packed_bytes(shape, dtypes),
        "dram": slot_bytes(shape, dtypes),
    }
    for level, num_bytes in slot.items():
        terms[level][RESIDENT_TERM] = division.experts[level] * num_bytes
        terms[level][SPARE_TERM] = division.spare_experts.get(level, 0) * num_bytes
    terms[computed][SLOTS_TERM] = division.num_slots * slot[computed]
    if division.num_slots_below:
        terms["dram"][SLOTS_TERM] = division.num_slots_below * slot["dram"]
    if is_staged and division.num_staged:
        terms["dram"]["staging"] = division.num_staged * slot["vram"] + _PAGES_GAP_BYTES


def _add_cache(
    terms: dict[LevelName, dict[str, float]],
    shape: ModelShape,
    policy: Policy,
    dtypes: Dtypes,
    division: Division,
    *,
    max_tokens: int,
    with_vram: bool,
) -> None:
    of_layer = policy.num_kv_pages * kv_page_bytes(shape, dtypes) / shape.num_layers
    for level in LEVELS:
        terms[level][KV_TERM] = division.kv_layers[level] * of_layer
        spare = division.spare_layers.get(level, 0) * of_layer
        terms[level][SPARE_TERM] = terms[level].get(SPARE_TERM, 0) + spare
    pages = window_pages(policy, max_tokens=max_tokens)
    window = NUM_WINDOWS * pages * kv_page_bytes(shape, dtypes) / shape.num_layers
    places: set[Place] = {"vram"} if with_vram else {"dram"}
    if not policy.attention_on_gpu:
        places.add("dram")
    for name in windows(division.kv_homes, places, "vram" if with_vram else "dram"):
        terms[name.level][KV_WINDOW_TERM] = terms[name.level].get(KV_WINDOW_TERM, 0) + window


def _whole(terms: Mapping[str, float]) -> dict[str, int]:
    return {name: ceil(num_bytes) for name, num_bytes in terms.items() if num_bytes > 0}


def _library_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes) -> int:
    widths = shape.hidden_size + max(shape.expert_width, shape.dense_width)
    return LIBRARY_BYTES + 2 * gemm_rows(policy) * widths * dtypes.compute_bytes


def dense_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Weights outside experts, each tensor at an aligned place."""
    gaps = _ROOM_OF_TENSOR * _TENSORS_PER_LAYER * shape.num_layers
    return shape.resident_params * dtypes.compute_bytes + gaps


def slot_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Room of one expert as stored: each matrix may begin and end within a block of the file."""
    return dtypes.expert_bytes(shape) + _NUM_MATRICES * 2 * _BLOCK_BYTES


def packed_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Room of one expert on a GPU, where matrices lie one after the other."""
    return dtypes.expert_bytes(shape) + _NUM_MATRICES * _PACKED_ALIGNMENT


def exchange_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes) -> int:
    """Queries, new keys and values, and results of the micro-batches that are on their way between
    a GPU and the CPU that attends for it; as much on either side."""
    width = 2 * shape.query_width + shape.cache_width
    rows = bucket_rows(policy.micro_batch_size)
    return (LOOK_AHEAD + 1) * rows * width * dtypes.compute_bytes


def window_pages(policy: Policy, *, max_tokens: int) -> int:
    """Pages of the largest micro-batch, where no sequence is longer than `max_tokens`."""
    return min(policy.num_kv_pages, policy.micro_batch_size * pages_of(max_tokens))


def kv_page_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """One page of keys and values, over all layers."""
    return PAGE_TOKENS * shape.kv_bytes_per_token(dtypes.compute_bytes)


def activation_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes, *, max_tokens: int) -> int:
    """What a pass needs beside weights and cache, at its largest."""
    limits = limits_of(policy, max_tokens=max_tokens)
    scratch = scratch_bytes(shape, limits, dtypes.compute_bytes, converts=dtypes.converts)
    residual = 2 * policy.tokens_per_pass * shape.hidden_size * dtypes.compute_bytes
    rows_seen = 2 * limits.kv_rows * shape.num_heads * FLOAT_BYTES  # scores and masks
    logits = _logits_bytes(shape, dtypes)
    return scratch + residual + rows_seen + logits + SAMPLING_BYTES


def _logits_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """A block of logits and the one before."""
    num_rows = bucket_rows(logits_rows(shape, dtypes.compute_bytes))
    return 2 * num_rows * shape.vocab_size * dtypes.compute_bytes
