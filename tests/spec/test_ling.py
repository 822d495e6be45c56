"""Shapes of Ling 3.0, and of what is not done of it."""

import json
from typing import Any

import pytest

from moebatch.spec.model.blocks import ClampedGate
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.recurrence import ChannelDelta
from tests import tiny
from tests.spec.described import Described

FAMILY = Described("bailing_hybrid", "BailingMoeV3ForCausalLM")
shape_of = FAMILY.shape_of
FEW = {"num_hidden_layers": 3, "layer_group_size": 3}


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"head_dim": 24, "num_attention_heads": 16, "num_key_value_heads": 16},
        {"short_conv_kernel_size": 3, "kda_lower_bound": -2.0},
        {"kda_safe_gate": False, "linear_num_heads": 5, "linear_head_dim": 20},
    ],
)
def test_layers_recur_as_transformers_takes_them_to(
    entries: dict[str, Any], is_written: bool
) -> None:
    """A file that transformers has written says of ``head_dim`` what rotates."""
    from transformers import AutoConfig

    with tiny.quiet():
        config = AutoConfig.for_model("bailing_hybrid", **entries)
    read = json.loads(config.to_json_string(use_diff=False)) if is_written else entries
    recurrence = shape_of(**{**read, "architectures": ["BailingHybridForCausalLM"]}).recurrence
    assert isinstance(recurrence, ChannelDelta)
    assert recurrence.num_key_heads == recurrence.num_value_heads == config.linear_num_heads
    assert recurrence.key_head_dim == recurrence.value_head_dim == config.linear_head_dim
    assert recurrence.conv_width == config.linear_conv_kernel_dim
    assert recurrence.least_fading == (config.kda_lower_bound if config.kda_safe_gate else None)
    assert recurrence.rank is None


def test_heads_that_attend_are_gated() -> None:
    attention = shape_of().attention
    assert isinstance(attention, LatentAttention) and attention.output_gate == "sigmoid"
    assert attention.tensors(2560)["output_gate"] == (32, 2560)


def test_limits_are_those_of_the_experts_of_each_layer() -> None:
    """The first layer has no shared expert, whatever its list says."""
    shape = shape_of(
        **FEW,
        first_k_dense_replace=1,
        expert_swiglu_limit_list=[0, None, 4],
        share_expert_swiglu_limit_list=[7, 5, 0],
    )
    four, five = (ClampedGate(limit=limit, clamps_activated=True) for limit in (4.0, 5.0))
    assert shape.expert_clamps == (None, None, four)
    assert shape.mlp_clamps == (None, five, None)


test_what_is_not_done_is_refused = FAMILY.refuses(
    ({"no_kda_lora": False}, "no_kda_lora: expected true, got false"),
    (
        {"gated_attention_proj_granularity_type": "element_wise"},
        "gated_attention_proj_granularity_type: expected head_wise, got 'element_wise'",
    ),
    ({"rope_interleave": False}, "rope_interleave: expected true, got false"),
    ({"score_function": "softmax"}, "score_function: expected sigmoid, got 'softmax'"),
    ({"use_mla_nope": True}, "use_mla_nope: expected false, got true"),
    ({"kda_lower_bound": 0}, "kda_lower_bound: expected a number below 0, got 0"),
    ({"kda_lower_bound": None}, "kda_lower_bound: expected a number below 0, got null"),
    (
        {"moe_shared_expert_intermediate_size": 20},
        "moe_shared_expert_intermediate_size: expected 768 as moe_intermediate_size, got 20",
    ),
    (
        {"num_hidden_layers": 43},
        "layer_group_size (6) must divide num_hidden_layers (43) where layer_types does not",
    ),
    ({"expert_swiglu_limit_list": [1.0]}, "a list with a number for each of 42 layers"),
    ({"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got 'gelu'"),
    ({"layer_group_size": 43, "layer_types": ["linear_attention"] * 42}, "no layer has full"),
)
