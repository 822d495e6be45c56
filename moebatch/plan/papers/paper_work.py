"""FLOP and bytes of one layer, as MoE-Lightning's authors count them."""

from moebatch.spec.shape import ModelShape


def attention_flops(shape: ModelShape, batch: float, queries: float, context: float) -> float:
    """FLOP of attention in one layer, `queries` tokens of each sequence against `context`.

    Counts one of the two matrix products, as the authors do.
    """
    return 2 * batch * queries * context * (shape.query_width + shape.num_heads)


def attention_bytes(shape: ModelShape, batch: float, queries: float, context: float) -> float:
    """Bytes that attention touches in one layer: queries and outputs, keys and values."""
    numbers = batch * (2 * queries * shape.query_width + context * shape.cache_width)
    return shape.dtype_bytes * numbers


def ffn_flops(shape: ModelShape, tokens: float) -> float:
    """FLOP of the experts of one layer for `tokens` tokens."""
    return 2 * shape.expert_params * shape.experts_per_token * tokens


def ffn_bytes(shape: ModelShape, tokens: float) -> float:
    """Bytes that the experts of one layer touch: all of their weights, inputs and outputs.

    The output is as wide as an expert, as the authors have it; it makes no difference.
    """
    activations = tokens * (shape.hidden_size + shape.expert_width)
    return shape.dtype_bytes * activations + shape.num_experts * shape.expert_stored_bytes
