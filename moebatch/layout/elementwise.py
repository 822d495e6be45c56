"""What norms, residuals, routing and combining move, counted in hidden states."""

from moebatch.spec.model.shape import ModelShape

_NORM_STATES = 4
"""Hidden states that norm and residual of half a layer move per token."""
_CHOICE_STATES = 2
"""For each choice of an expert: its input gathered, its output put in place."""


def norm_states(shape: ModelShape) -> int:
    """Hidden states that norms and residuals of a layer with experts move per token."""
    return _NORM_STATES * len(shape.norms + shape.moe_norms)


def choice_states(shape: ModelShape) -> float:
    """Hidden states that are moved for each choice of an expert, which may see narrower ones, and
    whose output may be normed in its place."""
    states = _CHOICE_STATES * (1 + shape.norms_each_expert)
    return states * shape.expert_size / shape.hidden_size


def elementwise_bytes(shape: ModelShape, dtype_bytes: int) -> float:
    """Bytes that all of it moves per token and layer."""
    states = norm_states(shape) + choice_states(shape) * shape.experts_per_token
    return states * shape.hidden_size * dtype_bytes
