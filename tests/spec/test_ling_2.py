"""Shapes of Ling 1.5 and 2.0, and of what is not done of them."""

import pytest

from moebatch.spec.model.models import load_model
from tests.spec.described import Described

SECOND = Described("bailing_moe", "BailingMoeV2ForCausalLM")
FIRST = Described("bailing_moe", "BailingMoeForCausalLM")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
GROUPS = {
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "routed_scaling_factor": 2.5,
}


def test_layers_are_as_files_say() -> None:
    shape = SECOND.shape_of(**SIZES, **GROUPS, partial_rotary_factor=0.5, head_dim=12)
    assert shape.moe_layers == (1, 2)
    assert (shape.attention.rotary_dim, shape.attention.head_dim) == (6, 12)
    assert shape.shared_expert is not None and shape.shared_expert.width == 24
    router = shape.router
    assert (router.scores, router.has_correction, router.scale) == ("sigmoid", True, 2.5)
    assert router.groups is not None and router.groups.num_kept == 2

    first = FIRST.shape_of(**SIZES, norm_topk_prob=True, use_qkv_bias=True)
    assert first.moe_layers == (0, 1, 2) and first.router.norm_order == 1.0
    assert first.router.scores == "softmax" and not first.router.has_correction
    assert "q_bias" in first.layer_tensors(0) and "o_bias" not in first.layer_tensors(0)


test_what_is_not_done_of_2_0_is_refused = SECOND.refuses(
    ({"norm_topk_prob": False}, "norm_topk_prob: expected true, got false"),
    ({"use_bias": True}, "use_bias: expected false, got true"),
    ({"use_qk_norm": None}, "use_qk_norm: expected true or false, got null"),
    ({"score_function": "softmax"}, "score_function: expected sigmoid, got 'softmax'"),
    (
        {"moe_router_enable_expert_bias": False},
        "moe_router_enable_expert_bias: expected true, got false",
    ),
    (
        {"moe_shared_expert_intermediate_size": 24},
        "moe_shared_expert_intermediate_size: expected 12 as moe_intermediate_size, got 24",
    ),
    ({"num_experts": None}, "num_experts: expected a whole number from 1"),
    ({"model_type": "bailing_hybrid"}, "model_type: expected 'bailing_moe_v2' as in the"),
    **SIZES,
    **GROUPS,
)
test_what_is_not_done_of_1_5_is_refused = FIRST.refuses(
    ({"norm_head": True}, "norm_head: expected false, got true"),
    ({"norm_topk_prob": None}, "norm_topk_prob: expected true or false, got null"),
    ({"use_sliding_window": True}, "use_sliding_window: expected false, got true"),
    **SIZES,
)


@pytest.mark.parametrize(
    ("name", "active"), [("ling-lite-1.5", 2.75), ("ling-mini-2.0", 1.43), ("ling-flash-2.0", 6.1)]
)
def test_as_much_computes_as_names_and_cards_say(name: str, active: float) -> None:
    shape = load_model(name).shape
    idle = shape.num_experts - shape.experts_per_token
    computing = shape.num_params - len(shape.moe_layers) * idle * shape.expert_params
    assert computing / 1e9 == pytest.approx(active, rel=0.02)
