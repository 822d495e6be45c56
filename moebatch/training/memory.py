"""What a whole model takes of main memory with gradients, term by term."""

from math import ceil

import torch

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.layout.buffers import LIBRARY_BYTES
from moebatch.layout.footprint import FLOAT_BYTES, Footprint
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.recurrence import CHUNK_TOKENS
from moebatch.spec.model.shape import ModelShape
from moebatch.training.reading import BATCH_TOKENS

_LOGITS = 6
"""Logits, those that count, their logarithms of shares, and gradients."""
_MODULE_BYTES = 96 * 2**20
"""What transformers' models bring into the process."""
_STATES = 4
"""A gate, its gradient, and two of the optimiser."""


def whole_footprint(
    files: ModelFiles, *, dtype: torch.dtype, longest: int, learns: bool
) -> Footprint:
    """What a `WholeModel` takes with the gradients of a batch, all that the process holds besides
    left out.

    Held against the kernel's count, with what the process held before, on a model of 6 layers with
    16 experts, hidden 1,024, expert width 1,024 and a vocabulary of 32,000 in bfloat16: gradients
    as it is took 1,908 MiB of 2,671 MiB here, gates that learn, in float32, 3,828 of 4,064 MiB.

    Args:
        dtype: what the model is loaded in.
        longest: tokens of the longest sequence; one of more than a batch has is a batch.
        learns: whether gates do.
    """
    shape, entries = files.shape, files.checkpoint.tensors.values()
    num_tokens, logits = max(BATCH_TOKENS, longest), _LOGITS * shape.vocab_size * FLOAT_BYTES
    activations = num_tokens * (_activations(shape) * dtype.itemsize + logits)
    chunk = _chunk_tokens(files, longest)
    padded = max(1, num_tokens // longest) * ceil(longest / chunk) * chunk
    if shape.recurrence is not None:
        of_token = len(shape.recurrent_layers) * shape.recurrence.trained_numbers(chunk)
        activations += padded * of_token * FLOAT_BYTES
    passing = {
        "files while they are loaded": sum(entry.num_bytes for entry in entries),
        "activations and their gradients": activations,
    }
    largest = max(passing, key=lambda name: passing[name])
    terms = {
        "weights": shape.num_params * dtype.itemsize,
        largest: passing[largest],
        "libraries": LIBRARY_BYTES + _MODULE_BYTES,
    }
    if learns:
        numbers = len(shape.moe_layers) * shape.num_experts * shape.hidden_size
        terms["gates that learn"] = _STATES * numbers * FLOAT_BYTES
    return Footprint(terms=terms)


def _activations(shape: ModelShape) -> int:
    """Numbers that stay from the way forward, for one token."""
    D, K, F = shape.hidden_size, shape.experts_per_token, shape.expert_width
    attention = sum(4 * (each.query_width + each.kv_width) for each in shape.attending)
    experts = K * (4 * D + 6 * F) + 6 * shape.shared_expert_width + 4 * shape.num_experts
    of_all = shape.num_layers * (10 * D + max(experts, 6 * shape.dense_width))
    recurrence = shape.recurrence
    convolved = 4 * (recurrence.conv_channels + recurrence.output_width) if recurrence else 0
    return of_all + attention + len(shape.recurrent_layers) * convolved


def _chunk_tokens(files: ModelFiles, longest: int) -> int:
    """Tokens that transformers takes through recurrent layers together."""
    recurrence = files.shape.recurrence
    if recurrence is None or recurrence.chunk_key is None:
        return CHUNK_TOKENS
    family = FAMILIES[files.shape.architecture]
    chunk = family.keys(files.config).count(recurrence.chunk_key)
    return chunk if recurrence.fills_chunks else min(chunk, longest)
