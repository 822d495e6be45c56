"""How many bytes of DRAM a policy takes, term by term."""

from collections.abc import Mapping
from dataclasses import dataclass

from moebatch.plan.scratch import MAX_GEMM_ROWS, bucket_rows, limits_of, logits_rows, scratch_bytes
from moebatch.spec.policy import PAGE_TOKENS, Policy
from moebatch.spec.shape import ModelShape

KV_TERM = "keys and values"
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
    """Bytes per weight element: in the files, and as computed."""

    stored_bytes: int
    compute_bytes: int


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


def footprint(
    shape: ModelShape, policy: Policy, *, dtypes: Dtypes, program_bytes: int, max_tokens: int
) -> Footprint:
    """Peak of every term under `policy`.

    Args:
        program_bytes: what the process holds before any weight is loaded.
        max_tokens: longest sequence of the job, prompt and answer.
    """
    slot = slot_bytes(shape, dtypes)
    terms = {
        "program and libraries": program_bytes + _library_bytes(shape, policy, dtypes),
        "weights outside experts": shape.resident_params * dtypes.compute_bytes + READ_WINDOW_BYTES,
        "resident experts": policy.num_resident * slot,
        "expert slots": policy.num_slots * slot,
        KV_TERM: policy.num_kv_pages * kv_page_bytes(shape, dtypes),
        "activations": activation_bytes(shape, policy, dtypes, max_tokens=max_tokens),
    }
    return Footprint(terms={name: num_bytes for name, num_bytes in terms.items() if num_bytes})


def _library_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes) -> int:
    rows = min(policy.tokens_per_pass, MAX_GEMM_ROWS)
    widths = shape.hidden_size + max(shape.expert_width, shape.dense_width)
    return LIBRARY_BYTES + 2 * rows * widths * dtypes.compute_bytes


def slot_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Room of one expert as stored: each matrix may begin and end within a block of the file."""
    return shape.expert_params * dtypes.stored_bytes + 3 * 2 * _BLOCK_BYTES


def kv_page_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """One page of keys and values, over all layers."""
    return PAGE_TOKENS * shape.kv_bytes_per_token(dtypes.compute_bytes)


def activation_bytes(shape: ModelShape, policy: Policy, dtypes: Dtypes, *, max_tokens: int) -> int:
    """What a pass needs beside weights and cache, at its largest."""
    converts = dtypes.stored_bytes != dtypes.compute_bytes
    limits = limits_of(policy, max_tokens=max_tokens)
    scratch = scratch_bytes(shape, limits, dtypes.compute_bytes, converts=converts)
    residual = 2 * policy.tokens_per_pass * shape.hidden_size * dtypes.compute_bytes
    rows_seen = 2 * limits.kv_rows * shape.num_heads * FLOAT_BYTES  # scores and masks
    num_rows = bucket_rows(logits_rows(shape, dtypes.compute_bytes))
    logits = 2 * num_rows * shape.vocab_size * dtypes.compute_bytes  # a block and the one before
    return scratch + residual + rows_seen + logits + SAMPLING_BYTES
