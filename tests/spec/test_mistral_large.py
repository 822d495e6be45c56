"""Mistral Large 4's text: queries that grow by what is learnt, layers without positions."""

from typing import Any

import pytest

from moebatch.spec.model.attention import LearntTemperature
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.models import load_model
from tests.spec.described import Described

FAMILY = Described("mistral_large4", "MistralLarge4ForConditionalGeneration", "mistral_large4_text")
shape_of = FAMILY.shape_of

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        SIZES,
        {
            **SIZES,
            "no_rope_layer_interval": 2,
            "mlp_layer_types": ["sparse", "dense"] * 2 + ["dense"],
        },
        {**SIZES, "no_rope_layers": [0, 1, 1, 0, 1, 1], "index_topk_pattern": "FSSFS"},
        {"index_topk_freq": 4, "n_shared_experts": 3, "final_logit_softcapping": 9.0},
        {"num_local_experts": 32, "n_group": 4, "topk_group": 2, "index_topk": 512},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    assert shape.num_experts == config.n_routed_experts
    assert shape.shared_expert_width == config.n_shared_experts * config.moe_intermediate_size
    assert shape.logit_cap == config.final_logit_softcapping
    assert shape.num_learnt_frequencies == config.qk_rope_head_dim // 2
    for layer, kind in enumerate(config.indexer_types):
        attention = shape.attention_of(layer)
        assert isinstance(attention, LatentAttention) and attention.indexer is not None
        rotated = config.qk_rope_head_dim * bool(config.no_rope_layers[layer])
        assert attention.rope_head_dim == attention.indexer.rotary_dim == rotated
        assert attention.head_dim == config.qk_head_dim
        assert attention.temperature == attention.indexer.temperature == LearntTemperature()
        assert attention.indexer.is_shared == (kind == "shared")
        assert attention.indexer.most == config.index_topk
        assert attention.norm_eps == config.rms_norm_eps


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    (
        {"kv_source_layers": [0, 0, 2, 3, 4]},
        "text_config.kv_source_layers: expected each layer's own number, since layers that "
        "share latents are not computed",
    ),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers: expected a list with a number for each of 5"),
    ({"no_rope_layers": [0] * 5}, "no layer has rotary positions"),
    ({"final_logit_softcapping": None}, "final_logit_softcapping: expected a number above 0"),
    ({"index_head_dim": 6}, "index_head_dim: expected at least qk_rope_head_dim, 8"),
    **SIZES,
)


def test_own_latents_may_be_said_to_be_a_layers_own() -> None:
    assert shape_of(**SIZES, kv_source_layers=[0, 1, 2, 3, 4]) == shape_of(**SIZES)


def test_latents_of_all_widths_come_before_keys_to_choose_by() -> None:
    """As each layer takes its parts, also that whose latents are met first behind such keys."""
    latents, plain, keys = load_model("mistral-large-4-1t-a52b").shape.cache_groups(4096)
    assert [group.layout.parts[0].width for group in (latents, plain, keys)] == [576, 512, 128]
    assert plain.layers == tuple(range(3, 72, 4))
    assert keys.layers == tuple(range(72))


def test_indexers_stay_away_where_all_tokens_are_chosen() -> None:
    shape = load_model("mistral-large-4-1t-a52b").shape
    short = shape.attending_within(2048)
    assert short.kv_bytes_per_token(2) == 2 * (54 * 576 + 18 * 512)
    assert shape.kv_bytes_per_token(2) == short.kv_bytes_per_token(2) + 2 * 72 * 128
    assert short.attends_beside_gpu and not shape.attends_beside_gpu
