"""How many experts of a layer a number of tokens need."""

from moebatch.spec.shape import ModelShape


def distinct_experts(shape: ModelShape, tokens: float) -> float:
    """Experts of a layer that at least one of so many tokens chooses, routing being even:
    E(1 - (1 - k/E)^b)."""
    if tokens <= 0:
        return 0.0
    share = shape.experts_per_token / shape.num_experts
    return shape.num_experts * float(1 - (1 - share) ** tokens)
