"""Shapes of Aria."""

from typing import Any

import pytest

from moebatch.errors import CheckpointError
from tests.spec.described import Described

FAMILY = Described("aria", "AriaForConditionalGeneration", "aria_text")
shape_of = FAMILY.shape_of

OTHERS = {
    "hidden_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 14,
    "moe_num_experts": 5,
    "moe_topk": 3,
    "moe_num_shared_experts": 4,
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize("entries", [{}, OTHERS])
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    assert shape.moe_layers == tuple(range(shape.num_layers))
    assert (shape.num_experts, shape.experts_per_token) == (config.moe_num_experts, config.moe_topk)
    assert shape.expert_width == config.intermediate_size
    assert shape.shared_expert is not None and shape.shared_expert.bias == config.mlp_bias
    assert shape.shared_expert_width == config.moe_num_shared_experts * config.intermediate_size
    attention = shape.attention
    assert attention.num_heads == config.num_attention_heads
    assert (attention.num_kv_heads, attention.head_dim) == (
        config.num_key_value_heads,
        config.head_dim,
    )
    assert attention.qkv_bias == attention.output_bias == config.attention_bias


def test_activations_of_the_shared_expert_alone_are_refused() -> None:
    with pytest.raises(CheckpointError, match="hidden_act: expected silu, got 'gelu'"):
        shape_of(hidden_act="gelu")
