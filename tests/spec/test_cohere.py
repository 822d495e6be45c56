"""Shapes of Cohere's models with experts, whose attention and experts see the same."""

from typing import Any

import pytest

from moebatch.spec.model.grouped_attention import GroupedAttention
from tests.spec.described import Described

FAMILY = Described("cohere2_moe", "Cohere2MoeForCausalLM")
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {**SIZES, "num_shared_experts": 3, "first_k_dense_replace": 2, "rms_norm_eps": 1e-3},
        {"num_shared_experts": 2, "shared_expert_combination_strategy": "sum"},
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "attention_bias": True},
        {
            "first_k_dense_replace": 5,
            "prefix_dense_intermediate_size": 70,
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window_pattern": 3,
        },
        {**SIZES, "layer_types": [FULL, SLIDING, FULL, FULL], "first_k_dense_replace": 1},
        {**SIZES, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
        {"rope_theta": 70.0, "tie_word_embeddings": False, "logit_scale": 0.3},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    assert (shape.num_experts, shape.experts_per_token) == (
        config.num_experts,
        config.num_experts_per_tok,
    )
    width = config.intermediate_size
    dense = config.prefix_dense_intermediate_size or width
    assert shape.expert_width == width
    assert shape.shared_expert_width == width * config.num_shared_experts
    assert shape.dense_width == dense * (len(shape.moe_layers) < shape.num_layers)
    shares = config.num_shared_experts and config.shared_expert_combination_strategy == "average"
    assert shape.shared_scale == shape.router.scale == (0.5 if shares else 1.0)
    assert shape.router.scores == config.expert_selection_fn
    is_normed = config.norm_topk_prob or shape.router.scores == "softmax"
    assert shape.router.norm_order == (1.0 if is_normed else None)
    assert shape.norm.kind == ("layer" if config.rms_norm_eps is None else "rms")
    assert shape.rms_eps == (config.rms_norm_eps or config.layer_norm_eps)
    assert (shape.logit_scale, shape.tie_word_embeddings) == (
        config.logit_scale,
        config.tie_word_embeddings,
    )
    forced = config.prefix_dense_sliding_window_pattern == 1
    for layer, kind in enumerate(config.layer_types):
        attention = shape.attention_of(layer)
        assert isinstance(attention, GroupedAttention)
        rotates = kind == SLIDING or (forced and layer not in shape.moe_layers)
        assert attention.rotary_dim == config.head_dim * rotates
        assert attention.rotates_neighbours
        assert (attention.num_heads, attention.num_kv_heads) == (
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        assert attention.qkv_bias == attention.output_bias == config.attention_bias
        window = config.sliding_window if kind == SLIDING else None
        assert shape.sliding_windows[layer] == window


@pytest.mark.parametrize(
    "entries",
    [
        SIZES,
        {**SIZES, "num_shared_experts": 2, "attention_bias": True, "first_k_dense_replace": 2},
    ],
)
def test_tensors_are_those_that_transformers_has(entries: dict[str, Any]) -> None:
    """One norm of each layer, without a bias."""
    entries = {**entries, "tie_word_embeddings": False, "pad_token_id": 0}
    FAMILY.assert_tensors_are_those_of_transformers(**entries)


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"expert_selection_fn": "tanh"}, "expert_selection_fn: expected softmax or sigmoid, got"),
    (
        {"num_shared_experts": 1, "shared_expert_combination_strategy": "max"},
        "shared_expert_combination_strategy: expected average or sum, got 'max'",
    ),
    ({"layer_norm_eps": 0}, "layer_norm_eps: expected a number above 0, got 0"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number above 0, got 'small'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling: expected null"),
    ({"sliding_window": None}, "sliding_window: expected a whole number"),
    ({"layer_types": [FULL] * 4}, "no layer has rotary positions; models without are not run"),
    **SIZES,
)
