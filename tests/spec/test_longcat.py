"""Shapes of LongCat-Flash, of whose layers each is two here."""

from typing import Any

import pytest

from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.models import load_model
from tests.spec.described import Described

FAMILY = Described("longcat_flash", "LongcatFlashForCausalLM")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 20,
    "expert_ffn_hidden_size": 12,
    "n_routed_experts": 5,
    "zero_expert_num": 3,
    "moe_topk": 4,
    "q_lora_rank": 18,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 14,
}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        SIZES,
        {"num_hidden_layers": 6, "num_layers": 3},
        {"num_experts_per_tok": 7, "intermediate_size": 40, "moe_intermediate_size": 24},
        {"num_local_experts": 48, "zero_expert_num": None, "rms_norm_eps": 1e-3},
        {"qk_rope_head_dim": 32, "head_dim": 32, "attention_bias": True},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    given = {key: value for key, value in entries.items() if value is not None}
    shape = FAMILY.shape_of(**entries)
    config = FAMILY.transformers(**given | ({"zero_expert_num": 0} if given != entries else {}))
    attention = shape.attention
    assert isinstance(attention, LatentAttention)
    assert (shape.num_layers, shape.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert shape.moe_layers == tuple(range(0, shape.num_layers, 2))
    assert shape.num_experts == config.n_routed_experts
    assert shape.router.num_identities == config.zero_expert_num
    assert shape.experts_per_token == config.moe_topk
    assert shape.expert_width == config.expert_ffn_hidden_size
    assert shape.dense_width == shape.shared_expert_width == config.ffn_hidden_size
    assert (shape.rms_eps, shape.router.scale) == (
        config.rms_norm_eps,
        config.routed_scaling_factor,
    )
    assert (attention.query_rank, attention.kv_rank) == (config.q_lora_rank, config.kv_lora_rank)
    assert (attention.head_dim, attention.rope_head_dim) == (config.qk_head_dim, config.head_dim)
    assert attention.value_head_dim == config.v_head_dim
    assert attention.qkv_bias == attention.output_bias == config.attention_bias
    assert shape.max_positions == config.max_position_embeddings


def test_tensors_are_those_that_transformers_has() -> None:
    FAMILY.assert_tensors_are_those_of_transformers(**SIZES, attention_bias=True)


def test_one_that_computes_nothing_is_priced_as_nothing() -> None:
    """Of twelve choices a third, where all are alike."""
    shape = FAMILY.shape_of()
    assert (shape.num_choices, shape.computed_per_token) == (768, pytest.approx(8))
    assert FAMILY.shape_of(zero_expert_num=0).computed_per_token == 12


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"num_layers": 2, "num_hidden_layers": 5}, "num_hidden_layers: expected 4, twice num_lay"),
    ({"router_bias": True}, "router_bias: expected false, since biases of gates are not read"),
    ({"zero_expert_type": "copy"}, "zero_expert_type: expected identity, got 'copy'"),
    ({"q_lora_rank": None}, "q_lora_rank: expected a whole number"),
    ({"head_dim": 32}, "qk_rope_head_dim (64) and head_dim (32) contradict each other"),
    ({"zero_expert_num": -1}, "zero_expert_num: expected a whole number"),
    ({"num_layers": 20_000}, "num_layers: expected a whole number from 1 to 10000"),
    qk_rope_head_dim=64,
)


def test_longcat_flash_is_as_large_as_its_paper_says() -> None:
    """560 billion parameters, of which about 27 take part in a token, embeddings left out."""
    shape = load_model("longcat-flash-chat").shape
    assert round(shape.num_params / 1e8) == 5607
    idle = len(shape.moe_layers) * (shape.num_experts - shape.computed_per_token)
    embedding = shape.vocab_size * shape.hidden_size
    assert round((shape.num_params - idle * shape.expert_params - embedding) / 1e9) == 27
