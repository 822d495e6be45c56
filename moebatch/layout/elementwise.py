"""What norms, residuals, routing and combining move, counted in hidden states."""

from moebatch.spec.model.shape import ModelShape

_NORM_STATES = 4
"""Hidden states that norm and residual of half a layer move per token."""
CHOICE_STATES = 2
"""For each choice of an expert: its input gathered, its output put in place."""


def norm_states(shape: ModelShape) -> int:
    """Hidden states that norms and residuals of a layer with experts move per token."""
    return _NORM_STATES * len(shape.norms + shape.moe_norms)


def elementwise_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Bytes that all of it moves per token and layer."""
    states = norm_states(shape) + CHOICE_STATES * shape.experts_per_token
    return states * shape.hidden_size * dtype_bytes
