"""Shapes of GLM-5.3-Flash: layers that recur, latents without positions, of which pools are chosen,
and streams whose mean comes out."""

import json
from pathlib import Path
from typing import Any

import pytest

from moebatch.errors import CheckpointError
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.recurrence import ChannelDelta
from moebatch.spec.model.shape_reader import read_shape
from tests import tiny
from tests.model.driver import Driver
from tests.model.test_oracle import assert_as_transformers
from tests.spec.described import Described

FAMILY = Described("glm5_next", "Glm5NextForConditionalGeneration", "glm5_next_text")
shape_of = FAMILY.shape_of


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"num_hidden_layers": 9, "index_topk": 60, "index_kpool": 5, "swiglu_limit": 7.0},
        {"num_hidden_layers": 4, "layer_types": ["full_attention", *3 * ["linear_attention"]]},
        {"hc_mult": 2, "hc_sinkhorn_iters": 3, "hc_eps": 0.01, "rms_norm_eps": 0.1},
        {"linear_lower_bound": None, "linear_num_heads": 8, "linear_head_dim": 24},
        {"linear_attn_config": {"head_dim": 24, "num_heads": 8, "short_conv_kernel_size": 3}},
        {"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}},
        {"linear_attn_config": {"gate_lower_bound": None}},
        {"linear_attn_config": {"gate_lower_bound": -2.5}},
        {"num_local_experts": 32, "n_group": 4, "topk_group": 2, "n_shared_experts": 3},
        {"mlp_layer_types": ["sparse"] * 45, "norm_topk_prob": False, "head_dim": 256},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    recurrent = [n for n, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    assert list(shape.recurrent_layers) == recurrent
    assert shape.num_experts == config.n_routed_experts
    attention, delta, streams = shape.attention, shape.recurrence, shape.streams
    assert isinstance(attention, LatentAttention) and isinstance(delta, ChannelDelta)
    assert (attention.rope_head_dim, attention.head_dim) == (0, config.qk_head_dim)
    assert attention.norm_eps == shape.rms_eps == config.rms_norm_eps
    assert attention.indexer is not None and attention.indexer.most == config.index_topk
    assert attention.indexer.pool == config.index_kpool
    assert attention.most_chosen == config.index_topk + config.index_kpool - 1
    heads = delta.num_value_heads, delta.key_head_dim, delta.conv_width
    said = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim
    assert heads == said and delta.rank == config.linear_head_dim
    assert delta.least_fading == config.linear_lower_bound
    assert streams is not None and streams.averages_last
    mixing = streams.count, streams.num_balancings, streams.eps
    assert mixing == (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
    clamp = shape.expert_clamp(0)
    assert clamp is not None and clamp.limit == config.swiglu_limit


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"qk_rope_head_dim": 64}, "text_config.qk_rope_head_dim: expected 0, got 64"),
    (
        {"index_kpool_always_select_tail": False},
        "text_config.index_kpool_always_select_tail: expected true, got false",
    ),
    ({"index_kpool": 3}, "index_topk (2048) must be a multiple of text_config.index_kpool (3)"),
    ({"linear_lower_bound": 0.5}, "linear_lower_bound: expected a number below 0, got 0.5"),
    (
        {"indexer_types": ["full", *44 * ["shared"]]},
        "layer 3 shares the choice of the one before, which makes none",
    ),
    ({"q_lora_rank": None}, "q_lora_rank: expected a number"),
)


def test_text_models_that_lie_beside_nothing_are_not_taken_for_usual_ones() -> None:
    alone = Described(FAMILY.family, FAMILY.architecture)
    with pytest.raises(CheckpointError, match="text_config: expected an object that says"):
        alone.shape_of(hidden_size=64, num_hidden_layers=5)


def test_rows_of_which_all_pools_are_chosen_need_no_indexer(tiny_checkpoint: Any) -> None:
    """30 tokens in pools of 6, and 5 behind these."""
    entries = json.loads((tiny_checkpoint("glm5_next") / "config.json").read_text())
    shape = read_shape(entries, "m/config.json")
    _, keys = (group for group in shape.cache_groups(64) if not group.is_state)
    assert keys.layout.token_bytes(4) == 2 * 12 * 4
    assert shape.attending_within(36) is shape
    (latents,) = (g for g in shape.attending_within(35).cache_groups(64) if not g.is_state)
    assert latents.layout.token_bytes(4) == 20 * 4


def test_pools_of_one_token_are_that_token(tmp_path: Path) -> None:
    """Files hold what weighs tokens in pools all the same."""
    folder = tiny.write_checkpoint(tmp_path, "glm5_next", index_kpool=1)
    assert_as_transformers(Driver(folder), slice_tokens=7)
