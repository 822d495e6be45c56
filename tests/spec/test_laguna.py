"""Shapes of Laguna, whose layers that slide may have another number of heads."""

from typing import Any

import pytest

from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.models import load_model
from tests.spec.described import Described

FAMILY = Described("laguna", "LagunaForCausalLM")
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 28,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "layer_types": [FULL, SLIDING] * 2,
    "sliding_window": 9,
}
BY_LAYER = {**SIZES, "num_attention_heads_per_layer": [4, 6, 4, 6]}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        BY_LAYER,
        {**SIZES, "gating": "per-element", "attention_bias": True, "rms_norm_eps": 1e-3},
        {"mlp_layer_types": ["sparse"] * 40, "num_attention_heads_per_layer": [64] * 40},
        {"moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 30.0},
        {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 70.0}}},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    assert (shape.num_experts, shape.experts_per_token) == (
        config.num_experts,
        config.num_experts_per_tok,
    )
    assert shape.expert_width == config.moe_intermediate_size
    assert shape.shared_expert_width == config.shared_expert_intermediate_size
    assert shape.dense_width == config.intermediate_size * (
        len(shape.moe_layers) < shape.num_layers
    )
    assert shape.rms_eps == config.rms_norm_eps
    assert shape.router.scale == config.moe_routed_scaling_factor
    assert (shape.router.logit_cap or 0.0) == config.moe_router_logit_softcapping
    for layer, kind in enumerate(config.layer_types):
        attention = shape.attention_of(layer)
        assert isinstance(attention, GroupedAttention)
        assert attention.num_heads == config.num_attention_heads_per_layer[layer]
        assert attention.num_kv_heads == config.num_key_value_heads
        share = config.rope_parameters[kind].get("partial_rotary_factor", 1.0)
        assert attention.rotary_dim == int(config.head_dim * share)
        assert attention.gate == ("apart" if config.gating == "per-element" else "of heads")
        assert attention.qkv_bias == attention.output_bias == config.attention_bias
        window = config.sliding_window if kind == SLIDING else None
        assert shape.sliding_windows[layer] == window


@pytest.mark.parametrize("entries", [BY_LAYER, {**BY_LAYER, "gating": "per-element"}])
@pytest.mark.parametrize("has_biases", [False, True])
def test_tensors_are_those_that_transformers_has(entries: dict[str, Any], has_biases: bool) -> None:
    entries = {**entries, "attention_bias": has_biases}
    FAMILY.assert_tensors_are_those_of_transformers(**entries)


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"gating": False}, "gating: expected true, per-head or per-element, got false"),
    (
        {"moe_apply_router_weight_on_input": True},
        "moe_apply_router_weight_on_input: expected false, got true",
    ),
    (
        {"num_attention_heads_per_layer": [4, 6, 8, 6]},
        f"num_attention_heads_per_layer: expected the same number for all of {FULL}",
    ),
    (
        {"num_attention_heads_per_layer": [4, 6]},
        "num_attention_heads_per_layer: expected a list with a number for each of 4 layers",
    ),
    (
        {"num_attention_heads_per_layer": [4, 5, 4, 5]},
        "num_attention_heads_per_layer (5) must be multiples of num_key_value_heads (2)",
    ),
    (
        {"num_attention_heads_per_layer": [0, 6, 0, 6]},
        "num_attention_heads_per_layer: expected a whole number from 1",
    ),
    ({"moe_router_logit_softcapping": -1.0}, "moe_router_logit_softcapping: expected a number"),
    ({"layer_types": [FULL]}, "layer_types has 1 entries for 4 layers"),
    **SIZES,
)


def test_layers_that_slide_keep_as_many_heads_of_keys_as_others() -> None:
    shape = load_model("laguna-xs.2").shape
    whole, sliding = shape.cache_groups(100_000)
    assert (len(whole.layers), len(sliding.layers)) == (10, 30)
    assert whole.layout == sliding.layout
    assert sliding.most_rows == 512 + 511
