"""Shapes of MiniMax-M3: grouped attention to blocks, chosen for each head of keys by itself."""

from typing import Any

import pytest

from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.models import load_model
from tests.spec.described import Described

FAMILY = Described("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl_text")
shape_of = FAMILY.shape_of

PART = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_local_experts": 6,
    "head_dim": 12,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "rope_parameters": PART,
}
RELEASED = {
    "hidden_act": "swigluoai",
    "rotary_dim": 6,
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "sparse_num_index_heads": 3,
        "sparse_index_dim": 10,
        "sparse_block_size": 7,
        "sparse_topk_blocks": 5,
        "sparse_local_block": 2,
        "sparse_attention_freq": [0, 0, 1],
    },
}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        SIZES,
        SIZES | RELEASED,
        {**SIZES, "layer_types": ["minimax_m3_sparse"] * 3, "index_topk_blocks": 3},
        {**SIZES, "mlp_layer_types": ["dense", "sparse", "dense"], "swiglu_limit": 2.0},
        {"num_experts_per_tok": 8, "shared_intermediate_size": 77, "routed_scaling_factor": 1.5},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    assert shape.num_experts == config.num_local_experts
    assert shape.experts_per_token == config.num_experts_per_tok
    assert shape.expert_width == config.intermediate_size
    assert shape.shared_expert_width == config.shared_intermediate_size
    dense = "dense" in config.mlp_layer_types
    assert shape.dense_width == (config.dense_intermediate_size if dense else 0)
    clamp = shape.expert_clamp(0)
    assert clamp is not None and clamp == shape.mlp_clamp(0) and clamp.added == 1.0
    assert (clamp.limit, clamp.alpha) == (config.swiglu_limit, config.swiglu_alpha)
    assert shape.router.scale == config.routed_scaling_factor
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    for layer, kind in enumerate(config.layer_types):
        attention = shape.attention_of(layer)
        assert isinstance(attention, GroupedAttention)
        assert attention.rotary_dim == int(config.head_dim * share)
        indexer = attention.indexer
        assert (indexer is None) == (kind == "full_attention")
        if indexer is not None:
            assert indexer.num_heads == config.index_n_heads == config.num_key_value_heads
            assert (indexer.head_dim, indexer.block_tokens, indexer.num_blocks) == (
                config.index_head_dim,
                config.index_block_size,
                config.index_topk_blocks,
            )
            assert indexer.num_last == config.index_local_blocks


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"rotary_dim": 4}, "rotary_dim: expected 6, as many as partial_rotary_factor has rotate"),
    ({"index_n_heads": 6}, "index_n_heads: expected 3, one for each head of keys, got 6"),
    ({"index_head_dim": 4}, "index_head_dim: expected at least the 6 numbers that rotate"),
    ({"index_local_blocks": 0}, "index_local_blocks: expected a whole number from 1 to 16"),
    ({"index_local_blocks": 17}, "index_local_blocks: expected a whole number from 1 to 16"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types: expected a list of full_att"),
    (
        {"sparse_attention_config": {"sparse_init_block": 1}},
        "sparse_attention_config: expected 0 as sparse_init_block, got 1",
    ),
    ({"use_gemma_norm": False}, "use_gemma_norm: expected true, got false"),
    ({"scoring_func": "softmax"}, "scoring_func: expected sigmoid, got 'softmax'"),
    **SIZES,
    layer_types=["full_attention", *["minimax_m3_sparse"] * 2],
)


def test_short_rows_choose_nothing() -> None:
    shape = shape_of(**SIZES | RELEASED)
    short = shape.attending_within(35)
    assert [each.most_chosen for each in shape.attentions] == [35, None]
    assert short.attends_beside_gpu and not shape.attends_beside_gpu
    assert {each.most_chosen for each in short.attentions} == {None}
    assert shape.attending_within(36) is shape
    unread = shape.layer_tensors(2).keys() - short.layer_tensors(2).keys()
    assert unread == {"index_q", "index_k", "index_q_norm", "index_k_norm"}


def test_minimax_m3_is_as_large_as_said() -> None:
    shape = load_model("minimax-m3").shape
    assert FAMILIES[shape.architecture].model_type == "minimax_m3_vl"
    heads, keys = shape.cache_groups(4096)
    assert (len(heads.layers), len(keys.layers)) == (60, 57)
    assert heads.layout.token_bytes(2) == 2 * 2 * 4 * 128
    assert keys.layout.token_bytes(2) == 2 * 128
