"""What learning takes of main memory: the whole model in float32, and what gradients need.

Shape letters: D hidden, F expert width, E experts, K experts per token.
"""

from moebatch.spec.shape import ModelShape
from moebatch.training.recipe import PIECE_TOKENS

_FLOAT_BYTES = 4
_LIBRARY_BYTES = 320 * 2**20
"""The model's code, and what the allocator keeps; measured."""
_STATES = 4
"""A gate, its gradient, and two of the optimiser."""
_LOGITS = 3
"""Logits, their probabilities and their gradient."""


def training_bytes(shape: ModelShape, longest: int) -> int:
    """Bytes beside what the process holds already, for gates that learn from sequences of at most
    `longest` tokens."""
    tokens = max(PIECE_TOKENS, longest)
    layers = shape.num_layers * _layer_numbers(shape)
    head = _LOGITS * shape.vocab_size
    gates = _STATES * len(shape.moe_layers) * shape.num_experts * shape.hidden_size
    loading = 2 * shape.num_experts * shape.expert_params  # those of one layer, being stacked
    numbers = shape.num_params + loading + tokens * (layers + head) + gates
    return numbers * _FLOAT_BYTES + _LIBRARY_BYTES


def _layer_numbers(shape: ModelShape) -> int:
    """Numbers of a token that a layer keeps until gradients have come back to it, rounded up."""
    D, F, K = shape.hidden_size, shape.expert_width, shape.experts_per_token
    attention = 6 * D + 4 * (shape.query_width + 2 * shape.kv_width)
    experts = 4 * shape.num_experts + K * (4 * D + 6 * F)
    others = 6 * (shape.shared_expert_width + shape.dense_width) + 4 * D
    return attention + experts + others
