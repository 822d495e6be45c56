"""Shapes of architectures that have keys of their own, against transformers' own models."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moebatch.formats.four_bit_floats import MXFP4
from moebatch.formats.plain import BFLOAT16
from moebatch.quoting import shown
from moebatch.spec.model.config_keys import FaultyConfig
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from tests import tiny
from tests.shapes import load_shape, stored_bytes
from tests.spec.described import transformers

ARCHITECTURES = {
    "dbrx": "DbrxForCausalLM",
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
SIZES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "vocab_size": 50,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 6, "moe_top_k": 2},
        "rope_parameters": {"rope_theta": 500000, "rope_type": "default"},
    },
    "deepseek_v2": {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 28,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
    },
    "gpt_oss": {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}
SIZES["deepseek_v3"] = SIZES["deepseek_v2"] | {"n_group": 2, "topk_group": 1}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dbrx", {}),
    (
        "dbrx",
        {"attn_config": {"kv_n_heads": 4, "clip_qkv": 3, "rope_theta": 5e5}, "max_seq_len": 77},
    ),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": 10, "attention_bias": True, "norm_topk_prob": True}),
    ("deepseek_v2", {"first_k_dense_replace": 0, "n_shared_experts": 1, "num_experts_per_tok": 6}),
    ("deepseek_v3", {"q_lora_rank": 10}),
    ("gpt_oss", {}),
    ("gpt_oss", {"attention_bias": False, "tie_word_embeddings": True, "sliding_window": 7}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
]


def config_of(family: str, **entries: Any) -> dict[str, Any]:
    own = {"architectures": [ARCHITECTURES[family]], "model_type": family}
    return {**own, **SIZES.get(family, {}), **entries}


def shape_of(family: str, **entries: Any) -> ModelShape:
    return read_shape(config_of(family, **entries), "m/config.json")


def faults_of(family: str, **entries: Any) -> str:
    with pytest.raises(FaultyConfig) as caught:
        shape_of(family, **entries)
    return str(caught.value)


def model_of(family: str, **entries: Any) -> Any:
    from transformers import AutoModelForCausalLM

    config = transformers(family, **{**SIZES[family], **entries})
    with tiny.quiet():
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").requires_grad_(
            False
        )


@pytest.mark.parametrize(("family", "entries"), OPTIONS)
def test_every_number_is_counted(family: str, entries: dict[str, Any]) -> None:
    shape = shape_of(family, **entries)
    with torch.device("meta"):
        model = model_of(family, **entries)
    corrections = (each for each in model.named_buffers() if "correction" in each[0])
    weights = chain(model.named_parameters(), corrections)
    numbers = {name: weight.numel() for name, weight in weights}
    experts = sum(count for name, count in numbers.items() if ".experts." in name)
    attention = sum(count for name, count in numbers.items() if "attn." in name)
    assert shape.num_params == sum(numbers.values())
    assert shape.num_experts * shape.expert_params * len(shape.moe_layers) == experts
    assert shape.resident_params == shape.num_params - experts
    assert shape.mixer_params(0) * shape.num_layers == attention


@pytest.mark.parametrize(("family", "entries"), OPTIONS)
def test_the_cache_holds_what_transformers_caches(family: str, entries: dict[str, Any]) -> None:
    shape, model = shape_of(family, **entries), model_of(family, **entries)
    with torch.no_grad():
        cache = model(torch.arange(5)[None]).past_key_values
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert 5 * shape.kv_bytes_per_token(4) == sum(4 * tensor.numel() for tensor in tensors)


@pytest.mark.parametrize(("family", "entries"), OPTIONS)
def test_flops_that_grow_with_pairs_are_those_of_attention(
    family: str, entries: dict[str, Any]
) -> None:
    """Of what plain attention computes, masked pairs included."""
    shape, model = shape_of(family, **entries), model_of(family, **entries)

    def flops(num_tokens: int) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(num_tokens)[None], use_cache=False)
        return counter.get_total_flops()

    grown = flops(16) - 2 * flops(8)
    assert grown == (16 * 16 - 2 * 8 * 8) * shape.num_layers * shape.attention.flops_per_pair


@pytest.mark.parametrize(("family", "entries"), OPTIONS)
def test_files_that_transformers_writes(
    family: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers(family, **{**SIZES[family], **entries})
    config.architectures = [ARCHITECTURES[family]]
    config.save_pretrained(tmp_path)
    assert load_shape(tmp_path) == shape_of(family, **entries)


@pytest.mark.parametrize("family", ["dbrx", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_absent_keys_are_filled_as_transformers_fills_them(family: str) -> None:
    entries = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    own = {"architectures": [ARCHITECTURES[family]], **entries}
    shape = read_shape(own, "m/config.json")
    config = transformers(family, **entries)
    assert shape.num_layers == config.num_hidden_layers
    assert shape.hidden_size == config.hidden_size
    assert shape.attention.num_heads == config.num_attention_heads
    assert shape.attention.num_kv_heads == config.num_key_value_heads
    assert shape.max_positions == config.max_position_embeddings
    assert shape.vocab_size == config.vocab_size
    assert shape.tie_word_embeddings == config.tie_word_embeddings
    if family == "dbrx":
        ffn, experts = config.ffn_config, config.ffn_config.moe_num_experts
        assert (shape.expert_width, shape.experts_per_token) == (ffn.ffn_hidden_size, ffn.moe_top_k)
        assert shape.attention.clip_qkv == config.attn_config.clip_qkv
        assert shape.activation == ffn.ffn_act_fn["name"]
    else:
        experts = getattr(config, "num_experts", None) or config.n_routed_experts
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        assert (shape.expert_width, shape.experts_per_token) == (width, config.num_experts_per_tok)
        assert shape.rms_eps == config.rms_norm_eps
        assert shape.attention.output_bias == config.attention_bias
        assert shape.activation == config.hidden_act
    assert shape.num_experts == experts
    if family.startswith("deepseek"):
        assert shape.shared_expert_width == config.n_shared_experts * config.moe_intermediate_size
        is_v3 = family == "deepseek_v3"
        assert shape.router.norm_order == (1.0 if is_v3 and config.norm_topk_prob else None)
        assert shape.router.scale == config.routed_scaling_factor
        assert len(shape.moe_layers) == shape.num_layers - config.first_k_dense_replace
        has_dense = len(shape.moe_layers) < shape.num_layers
        assert shape.dense_width == config.intermediate_size * has_dense
        assert shape.attention.head_dim == config.qk_head_dim
        assert shape.attention == LatentAttention(
            rotates_neighbours=True,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.qk_head_dim,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            kv_rank=config.kv_lora_rank,
            query_rank=config.q_lora_rank,
            rope_head_dim=config.qk_rope_head_dim,
            value_head_dim=config.v_head_dim,
        )
    if family == "gpt_oss":
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        assert shape.sliding_windows == tuple(128 if each else None for each in slides)
        assert shape.attention.head_dim == config.head_dim


def test_deepseek_moe_by_hand() -> None:
    """transformers has no class of this architecture."""
    entries = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 28,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
    }
    shape = shape_of("deepseek", **entries)
    attention, norms = 4 * 32 * 32, 2 * 32
    dense = attention + norms + 3 * 32 * 28
    sparse = attention + norms + 32 * 6 + 3 * 32 * 24
    assert (shape.attention.num_kv_heads, shape.attention.head_dim) == (4, 8)
    assert shape.moe_layers == (1, 2)
    assert [shape.resident_layer_params(layer) for layer in range(3)] == [dense, sparse, sparse]
    assert shape.num_params == 2 * 50 * 32 + 32 + dense + 2 * sparse + 2 * 6 * 3 * 32 * 12
    without = shape_of("deepseek", **entries | {"n_shared_experts": None})
    assert (without.shared_expert_width, without.num_params) == (0, shape.num_params - 2 * 72 * 32)
    every_other = shape_of("deepseek", **entries | {"moe_layer_freq": 2})
    assert every_other.moe_layers == (2,)


def test_absorbed_queries_take_more_per_pair_and_no_keys_of_cached_positions() -> None:
    """DeepSeek-V2-Lite: 16 heads over latents of 512 and 64 with positions."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    shape = shape_of("deepseek_v2", **sizes, v_head_dim=128, num_attention_heads=16)
    assert shape.attention.flops_per_pair == 2 * 16 * (128 + 64 + 128)
    assert shape.attention.decode_flops_per_pair == 2 * 16 * (512 + 64 + 512)
    plain = shape_of("gpt_oss")
    assert (
        plain.attention.decode_flops_per_pair
        == plain.attention.flops_per_pair
        == 4 * plain.attention.query_width
    )


def test_quantised_experts_are_counted_as_they_are_stored() -> None:
    """MXFP4 in the released files: blocks of 16 bytes and a scale of one byte for 32 numbers."""
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    shape = shape_of("gpt_oss", **sizes, quantization_config=mxfp4)
    gate_up, down = 2 * 96 * (64 // 32), 64 * (96 // 32)
    assert shape.expert_format is MXFP4
    assert stored_bytes(shape) == (gate_up + down) * (16 + 1) + (2 * 96 + 64) * 2
    whole = shape_of("gpt_oss", **sizes)
    assert whole.expert_format is BFLOAT16
    assert stored_bytes(whole) == 2 * whole.expert_params


def test_data_type_that_released_files_leave_out() -> None:
    assert shape_of("gpt_oss").dtype == "bfloat16"
    assert shape_of("gpt_oss", dtype="float32").dtype == "float32"
    assert shape_of("dbrx").dtype == "float32"


@pytest.mark.parametrize(
    ("family", "method"), [("dbrx", "hqq"), ("gpt_oss", "aqlm"), ("gpt_oss", ["mxfp4"])]
)
def test_other_quantisations_are_refused(family: str, method: object) -> None:
    message = faults_of(family, quantization_config={"quant_method": method})
    assert f"quantization_config ({shown(method)}): such checkpoints are not read" in message


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("dbrx", {"d_model": 0}, "d_model: expected a whole number from 1 to 2147483647, got 0"),
        ("dbrx", {"ffn_config": {"moe_top_k": 5}}, "ffn_config.moe_top_k (5) is more than ffn_con"),
        ("dbrx", {"ffn_config": {"moe_num_experts": "4"}}, "ffn_config.moe_num_experts: expected"),
        ("dbrx", {"ffn_config": 4}, "ffn_config: expected an object with keys, got 4"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": "silu"}}, "ffn_config.ffn_act_fn: expected an obj"),
        ("dbrx", {"n_heads": 3}, "n_heads (3) must be a multiple of attn_config.kv_n_heads (2)"),
        (
            "dbrx",
            {"rope_parameters": {"rope_theta": 1e4}},
            "attn_config.rope_theta (500000) and rope_parameters.rope_theta (10000.0) contradict",
        ),
        ("dbrx", {"d_model": 30}, "d_model (30) must be a multiple of n_heads (4)"),
        (
            "deepseek",
            {},
            "n_routed_experts: expected a whole number from 1 to 2147483647, got null",
        ),
        ("deepseek", {"n_shared_experts": -1}, "n_shared_experts: expected a whole number"),
        ("deepseek_v2", {"first_k_dense_replace": True}, "first_k_dense_replace: expected a whole"),
        ("deepseek_v2", {"qk_rope_head_dim": 5}, "qk_rope_head_dim (5) must be even for rotary"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank: expected a whole number"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias: expected false, since biases of experts"),
        ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank: expected a whole number"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("gpt_oss", {"rms_norm_eps": 10**400}, "rms_norm_eps: expected a number above 0"),
    ],
)
def test_faults_name_keys_as_the_file_spells_them(
    family: str, entries: dict[str, Any], message: str
) -> None:
    assert f"m/config.json: {message}" in faults_of(family, **entries)
