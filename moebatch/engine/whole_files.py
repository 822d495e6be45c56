"""Weights of a model folder all in memory at once, where there is room for that."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from moebatch.engine.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.model.whole_model import WholeModel
from moebatch.plan.footprint import FLOAT_BYTES, LIBRARY_BYTES, Footprint
from moebatch.spec.shape import ModelShape

_LOGITS = 6
"""Logits, those that count, their logarithms of shares, and gradients."""
_MODULE_BYTES = 96 * 2**20
"""What transformers' models bring into the process."""


def whole_footprint(files: ModelFiles, *, batch_tokens: int) -> Footprint:
    """What a `WholeModel` takes with the gradients of so many tokens at a time, all that the
    process holds besides left out."""
    size, entries = files.dtype.itemsize, [e for _, e in files.checkpoint.tensors.values()]
    per_token = _activations(files.shape) * size + _LOGITS * files.shape.vocab_size * FLOAT_BYTES
    passing = {
        "files while they are loaded": sum(entry.num_bytes for entry in entries),
        "activations and their gradients": batch_tokens * per_token,
    }
    largest = max(passing, key=lambda name: passing[name])
    return Footprint(
        terms={
            "weights": sum(prod(entry.shape) for entry in entries) * size,
            largest: passing[largest],
            "libraries": LIBRARY_BYTES + _MODULE_BYTES,
        }
    )


def _activations(shape: ModelShape) -> int:
    """Numbers that stay from the way forward, for one token."""
    D, K, F = shape.hidden_size, shape.experts_per_token, shape.expert_width
    attention = 10 * D + 4 * (shape.query_width + shape.kv_width)
    experts = K * (3 * D + 6 * F) + 6 * shape.shared_expert_width + 4 * shape.num_experts
    return shape.num_layers * (attention + max(experts, 6 * shape.dense_width))


def load_whole(files: ModelFiles) -> WholeModel:
    """The model with all of its weights. Raises CheckpointError."""
    from transformers import AutoModelForCausalLM

    folder = files.checkpoint.folder
    try:
        with _no_bars():
            module = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=files.dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                experts_implementation="eager",
            )
    except Exception as error:  # Damaged files make its libraries raise anything.
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # some are still the mapped files themselves
    return WholeModel(module, files.shape)


@contextmanager
def _no_bars() -> Iterator[None]:
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()
