"""Shapes from config.json against transformers' own reading of the same file."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.activations import ACT2FN

from moebatch.errors import CheckpointError
from moebatch.quoting import shown
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.blocks import Residual
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import (
    ACTIVATIONS,
    read_planned_shape,
    read_runnable_shape,
    read_shape,
)
from tests import tiny
from tests.shapes import load_shape
from tests.spec import described

ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "sarvam_moe": "SarvamMoEForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "mellum": "MellumForCausalLM",
    "beam": "BeamForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "kolibri1": "Kolibri1ForCausalLM",
    "flint": "FlintForCausalLM",
    "lara_mini": "LaraMiniForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "axk1": "AXK1ForCausalLM",
    "axk2": "AXK2ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
OTHERS = (
    "granitemoe",
    "granitemoeshared",
    "granitemoe_swa",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "hy_v3",
    "solar_open",
    "afmoe",
    "mellum",
    "beam",
    "mistral4",
    "kimi_linear",
    "bailing_hybrid",
    "kolibri1",
    "flint",
    "lara_mini",
    "minimax",
    "phimoe",
    "flex_olmo",
    "sarvam_moe",
    "sarvam_mla",
    "axk1",
    "axk2",
)
LATENT = (
    *tiny.LATENT,
    "mistral4",
    "kimi_linear",
    "bailing_hybrid",
    "sarvam_mla",
    "axk1",
    "hy_v4",
    "axk2",
)
NEEDED = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6}}
"""What is refused without: the default sizes do not divide each other."""
BIASES = ("correction_bias", "expert_bias")
"""Buffers that are corrections of routers."""
HYBRID = {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_n_heads": 4}

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"sliding_window": 77, "num_experts": 12, "hidden_act": "gelu"}),
    ("mixtral", {"head_dim": 96, "num_key_value_heads": 32, "tie_word_embeddings": True}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 5, "qkv_bias": False}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2_moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2, 8], "norm_topk_prob": True}),
    (
        "qwen2_moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
    ("qwen3_moe", {"num_local_experts": 16, "attention_bias": True, "head_dim": 128}),
    ("qwen3_moe", {"use_sliding_window": True, "mlp_only_layers": [0], "norm_topk_prob": True}),
    ("olmoe", {"clip_qkv": 8.0, "attention_bias": True, "num_key_value_heads": 4}),
    ("olmoe", {"num_local_experts": 32, "norm_topk_prob": True}),
    ("glm4_moe", {"attention_bias": True, "first_k_dense_replace": 3, "n_group": 4}),
    ("glm4_moe", {"n_shared_experts": 2, "norm_topk_prob": False, "use_qk_norm": True}),
    ("minimax_m2", {"num_local_experts": 32, "rotary_dim": 64}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True, "sliding_window": 70}),
    ("qwen3_next", {"full_attention_interval": 2, "linear_num_value_heads": 16}),
    ("qwen3_next", {"mlp_only_layers": [1], "attention_bias": True, "num_hidden_layers": 5}),
    ("ernie4_5_moe", {"moe_num_experts": 12, "moe_k": 3, "use_bias": True, "moe_norm_min": 0.1}),
    (
        "ernie4_5_moe",
        {"moe_layer_interval": 3, "moe_layer_start_index": 3, "moe_layer_end_index": 7},
    ),
    ("hunyuan_v1_moe", {"head_dim": 12, "num_experts": 5, "moe_topk": 3, "attention_bias": True}),
    ("hy_v3", {"num_shared_experts": 3, "mlp_bias": True, "attention_bias": True}),
    (
        "dots1",
        {
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "max_window_layers": 2,
            "norm_topk_prob": True,
        },
    ),
    ("exaone_moe", {"num_shared_experts": 3, "n_group": 4, "sliding_window_pattern": 5}),
    ("beam", {"n_group": 2, "topk_group": 1, "attention_bias": True, "num_key_value_heads": 4}),
    (
        "beam",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "num_hidden_layers": 2,
            "sliding_window": 11,
        },
    ),
    ("solar_open", {"n_group": 4, "attention_bias": True, "n_shared_experts": 2}),
    ("sarvam_moe", {"num_experts": 16, "num_shared_experts": 2, "use_qkv_bias": True}),
    ("axk2", {"n_group": 4, "topk_group": 2, "gated_norm_rank": 5, "moe_layer_freq": 3}),
    ("axk1", {"first_k_dense_replace": 2, "moe_layer_freq": 3, "num_local_experts": 64}),
    ("sarvam_moe", {"n_group": 4, "use_qk_norm": False, "partial_rotary_factor": 0.5}),
    ("sarvam_mla", {"num_experts": 16, "q_lora_rank": 40, "rope_interleave": False}),
    ("granitemoe", {"num_key_value_heads": 8, "attention_multiplier": 0.1, "logits_scaling": 6.0}),
    ("granitemoeshared", {"shared_intermediate_size": 24, "residual_multiplier": 0.22}),
    ("qwen3_5_moe_text", {"linear_conv_kernel_dim": 3, "linear_value_head_dim": 24}),
    (
        "kolibri1",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "sliding_window": 11,
            "norm_topk_prob": True,
        },
    ),
    (
        "lara_mini",
        {
            "layer_types": ["full_attention", "sliding_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "sliding_window": 11,
            "norm_topk_prob": False,
            "linear_value_head_dim": 24,
        },
    ),
    ("flint", {"mlp_only_layers": [3], "num_hidden_layers": 6, "attention_bias": True}),
    (
        "granitemoe_swa",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [50.0, 7],
            "num_hidden_layers": 2,
            "sliding_window": 11,
            "shared_intermediate_size": 24,
        },
    ),
    ("granitemoehybrid", {**HYBRID, "shared_intermediate_size": 24}),
    (
        "granitemoehybrid",
        {
            **HYBRID,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.0, math.inf],
        },
    ),
    (
        "kimi_linear",
        {
            "linear_attn_config": {
                "kda_layers": [4, 1],
                "full_attn_layers": [2, 3],
                "head_dim": 10,
                "num_heads": 3,
                "short_conv_kernel_size": 3,
            },
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "q_lora_rank": 9,
            "head_dim": 72,
        },
    ),
    (
        "kimi_linear",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "num_hidden_layers": 2,
            "linear_num_heads": 3,
            "attention_bias": True,
            "num_shared_experts": 2,
            "moe_renormalize": False,
            "num_expert_group": 4,
        },
    ),
    (
        "bailing_hybrid",
        {
            "layer_group_size": 2,
            "num_hidden_layers": 4,
            "moe_renormalize": False,
            "n_shared_experts": 2,
        },
    ),
    (
        "bailing_hybrid",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "num_hidden_layers": 2,
            "first_k_dense_replace": 0,
            "head_dim": 24,
            "num_expert_group": 4,
            "q_lora_rank": 9,
            "attention_bias": True,
        },
    ),
    (
        "minimax",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_hidden_layers": 3,
            "head_dim": 20,
            "full_attn_alpha_factor": 3,
            "full_attn_beta_factor": 0.5,
            "linear_attn_alpha_factor": 2.5,
            "linear_attn_beta_factor": 1.5,
            "mlp_alpha_factor": 3.5,
            "mlp_beta_factor": 0.75,
        },
    ),
    ("minimax", {"sliding_window": 70, "num_local_experts": 12, "hidden_act": "gelu"}),
    (
        "lfm2_moe",
        {
            "layer_types": ["conv", "conv", "full_attention"],
            "num_hidden_layers": 3,
            "num_dense_layers": 0,
        },
    ),
    (
        "lfm2_moe",
        {
            "layer_types": ["full_attention", "conv"],
            "num_hidden_layers": 2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "use_expert_bias": False,
            "tie_embedding": False,
        },
    ),
]


def minimal(family: str = "mixtral", **entries: Any) -> dict[str, Any]:
    needed = NEEDED.get(family, {})
    return {"architectures": [ARCHITECTURES[family]], "model_type": family, **needed, **entries}


def faults_of(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_shape(config, "m/config.json")
    return str(caught.value)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *OTHERS])
def test_absent_keys_are_filled_as_transformers_fills_them(family: str) -> None:
    assert_agrees(read_shape(minimal(family), "config.json"), transformers(family))


@pytest.mark.parametrize(
    "architecture",
    [
        name
        for name, family in FAMILIES.items()
        if family.model_type in CONFIG_MAPPING
        and CONFIG_MAPPING[family.model_type].attribute_map
        and not family.within
    ],
)
def test_names_that_transformers_takes_for_others_are_read(architecture: str) -> None:
    family = FAMILIES[architecture]
    sizes = {"num_experts": 32, "num_experts_per_tok": 3, "num_hidden_layers": 6, "head_dim": 96}
    sizes |= {"hidden_size": 768, "num_attention_heads": 8, "max_position_embeddings": 77}
    named = {family.spelled(key): size for key, size in sizes.items()}
    config: dict[str, Any] = {"architectures": [architecture]}
    of_keys = {"DeepseekV4ForCausalLM": 1, "Dots3NoteForCausalLM": 8}  # others are refused
    config |= {"num_key_value_heads": of_keys.get(architecture, 4), "n_shared_experts": 1}
    config |= {name: size for name, size in named.items() if "." not in name}
    if "layer_types" in CONFIG_MAPPING[family.model_type].attribute_map.values():
        config["layer_types"] = ["full_attention"] * sizes["num_hidden_layers"]
    shape = read_shape(config, "config.json")
    for synonym, name in CONFIG_MAPPING[family.model_type].attribute_map.items():
        if name not in config:
            continue
        others = {key: value for key, value in config.items() if key != name}
        assert read_shape({**others, synonym: config[name]}, "config.json") == shape
        with pytest.raises(CheckpointError, match="contradict each other"):
            read_shape(config | {synonym: 16}, "config.json")


def test_such_names_are_read_of_a_text_model_beside_others() -> None:
    text = {"model_type": "mistral4", "num_local_experts": 64}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert read_shape(config, "config.json").num_experts == 64
    with pytest.raises(CheckpointError, match=r"text_config\.model_type: expected mistral4"):
        read_shape(config | {"text_config": {}}, "config.json")


def test_a_list_for_all_layers_and_one_number_may_say_the_same() -> None:
    both = minimal("hunyuan_v1_moe", num_experts=4, moe_topk=[2] * 32, num_experts_per_tok=2)
    assert read_shape(both, "config.json").experts_per_token == 2


def test_of_two_ways_to_say_how_positions_rotate_the_older_one_counts() -> None:
    """As in transformers: somebody adds the released scaling to a file that it has saved."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    both = read_shape(minimal("deepseek_v3", rope_scaling=yarn, **plain), "config.json")
    alone = read_shape(minimal("deepseek_v3", rope_scaling=yarn), "config.json")
    assert both.attention.score_scale == alone.attention.score_scale is not None


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_beside_nested_configurations_holds_for_the_text_model(key: str) -> None:
    text = minimal("qwen3_5_moe_text")
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        key: "bfloat16",
    }
    assert read_shape(config, "config.json").dtype == "bfloat16"


def test_formats_of_a_text_beside_others_may_be_said_with_it() -> None:
    """As Kimi-K2.5 does."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    beside = config | {"text_config": {}, "quantization_config": quantization}
    within = config | {"text_config": {"quantization_config": quantization}}
    found, other = (read_shape(each, "config.json").expert_format for each in (beside, within))
    assert found == other and found.name == "packed int4"
    with pytest.raises(CheckpointError, match=r"quantization_config \('hqq'\): such checkpoints"):
        read_shape(config | {"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "c")


def test_the_text_of_internvl_has_to_have_experts() -> None:
    config = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl"}
    for kind in ("qwen2", "gpt_oss"):
        with pytest.raises(CheckpointError, match=r"text_config\.model_type: expected qwen3_moe,"):
            read_shape(config | {"text_config": {"model_type": kind}}, "config.json")
    with pytest.raises(CheckpointError, match=r"text_config\.model_type: expected qwen3_moe,"):
        read_shape(config, "config.json")


def test_codes_of_a_text_model_are_found_under_its_own_names() -> None:
    """Not under those of the release that sees pictures, which a plain weight would tell apart."""
    shape = read_shape(minimal("qwen3_5_moe_text"), "config.json")
    names = FAMILIES[shape.architecture].names
    for stored in ("k_proj.weight", "k_proj.weight_packed", "k_proj.qweight"):
        there = {f"model.layers.3.self_attn.{stored}"}
        found, _ = names.layer_weights(shape, 3, there)["k"]
        assert found == "model.layers.3.self_attn.k_proj.weight"


@pytest.mark.parametrize(("family", "entries"), OPTIONS)
def test_options(family: str, entries: dict[str, Any]) -> None:
    shape = read_shape(minimal(family, **entries), "config.json")
    assert_agrees(shape, transformers(family, **entries))


@pytest.mark.parametrize(("family", "entries"), [(f, {}) for f in tiny.FAMILIES] + OPTIONS)
def test_files_that_transformers_writes(
    family: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers(family, **entries)
    config.architectures = [ARCHITECTURES[family]]
    config.save_pretrained(tmp_path)
    read = load_shape(tmp_path)
    assert_agrees(read, config)
    assert read == read_shape(minimal(family, **entries), "config.json")


@pytest.mark.parametrize(
    ("family", "entries"), [(f, {"tie_word_embeddings": True}) for f in tiny.FAMILIES] + OPTIONS
)
def test_every_number_is_counted(family: str, entries: dict[str, Any]) -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 20,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 28,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    entries = {**sizes, **entries} | {"num_key_value_heads": 2, "pad_token_id": 0}
    shape = read_shape(minimal(family, **entries), "config.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers(family, **entries))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    corrections = sum(b.numel() for name, b in model.named_buffers() if name.endswith(BIASES))
    assert shape.num_params == model.num_parameters() + corrections
    assert shape.resident_params == shape.num_params - experts
    assert shape.num_experts * shape.expert_params * len(shape.moe_layers) == experts


def test_known_figures_of_released_models() -> None:
    """The sizes on the model cards."""
    mixtral = read_shape(minimal("mixtral"), "")
    assert mixtral.num_params == 46_702_792_704
    assert mixtral.kv_bytes_per_token(2) == 131_072
    qwen3 = {"num_hidden_layers": 48, "head_dim": 128, "num_key_value_heads": 4}
    assert round(read_shape(minimal("qwen3_moe", **qwen3), "").num_params / 1e8) == 305


@pytest.mark.parametrize(
    ("entries", "dtype", "num_bytes"),
    [
        ({}, "float32", 4),
        ({"torch_dtype": "bfloat16"}, "bfloat16", 2),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16", 2),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, "bfloat16", 2),
    ],
)
def test_dtype(entries: dict[str, Any], dtype: str, num_bytes: int) -> None:
    shape = read_shape(minimal(**entries), "")
    assert (shape.dtype, shape.dtype_bytes) == (dtype, num_bytes)


def test_all_faults_are_listed_at_once() -> None:
    config = minimal(
        "mixtral",
        hidden_size=0,
        num_attention_heads=True,
        num_hidden_layers="32",
        vocab_size=-5,
        num_experts_per_tok=9,
        rms_norm_eps=float("nan"),
        tie_word_embeddings="no",
        sliding_window=0,
        hidden_act=None,
        dtype="int8",
    )
    assert faults_of(config).splitlines() == [
        "m/config.json: num_hidden_layers: expected a whole number from 1 to 10000, got '32'",
        "m/config.json: num_attention_heads: expected a whole number from 1 to 2147483647, "
        "got true",
        "m/config.json: hidden_size: expected a whole number from 1 to 2147483647, got 0",
        "m/config.json: sliding_window: expected a whole number from 1 to 2147483647, got 0",
        "m/config.json: vocab_size: expected a whole number from 1 to 2147483647, got -5",
        "m/config.json: tie_word_embeddings: expected true or false, got 'no'",
        "m/config.json: num_experts_per_tok (9) is more than num_local_experts (8)",
        "m/config.json: rms_norm_eps: expected a number above 0, got nan",
        "m/config.json: hidden_act: expected a name, got null",
        "m/config.json: dtype: expected one of float32, float16, bfloat16, got 'int8'",
    ]


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "moe_topk: expected the same for all layers, got"),
        ("mixtral", {"num_attention_heads": 6}, "6) must be a multiple of num_key_value_heads (8)"),
        ("mixtral", {"hidden_size": 4100}, "hidden_size (4100) must be a multiple of num_attent"),
        ("mixtral", {"head_dim": 7}, "head_dim (7) must be even"),
        ("mixtral", {"hidden_size": 4096.0}, "got 4096.0"),
        ("mixtral", {"num_hidden_layers": 10**9}, "from 1 to 10000, got 1000000000"),
        (
            "mixtral",
            {"num_local_experts": 10**6},
            "num_local_experts (1000000) in 32 layers are more than 262144 in all",
        ),
        ("olmoe", {"head_dim": 64}, "num_attention_heads (16) x head_dim (64) must be hidden_size"),
        ("olmoe", {"clip_qkv": -1}, "clip_qkv: expected a number above 0, got -1"),
        ("granitemoe", {"logits_scaling": 1e-320}, "logits_scaling: expected a number above 0"),
        ("olmoe", {"model_type": "mixtral"}, "model_type: expected 'olmoe'"),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 9}, "contradict each other"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts: expected a whole number"),
        ("qwen2_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers: expected a list of layer"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a whole number"),
        # transformers activates convolutions by it as well.
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got 'gelu'"),
        *(
            ("granitemoe_swa", {"layer_rope_theta": bases}, f"layer_rope_theta: expected {what}")
            for bases, what in (
                ([50.0] * 31 + [0], "the same number for all layers of sliding_attention"),
                ([50.0] * 31, "a list with a number of at least 0 for each of 32 layers"),
                ([-1.0] * 32, "a list with a number of at least 0 for each of 32 layers"),
                (50.0, "a list with a number of at least 0 for each of 32 layers"),
            )
        ),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 32}, "no layer has full attention"),
        ("granitemoehybrid", {"mamba_n_heads": 127}, "must be mamba_expand x hidden_size (8192)"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "must be a multiple of mamba_n_groups (3)"),
        (
            "granitemoehybrid",
            {"time_step_limit": [0.0, 1.0]},
            "time_step_limit: expected [0.0, Infinity], got [0.0, 1.0]",
        ),
        ("lfm2_moe", {}, "no layer has full attention"),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 27}, "no layer has full attention"),
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got 'gelu'"),
        ("lara_mini", {"layer_types": ["linear_attention"] * 34}, "no layer has full attention"),
        ("lara_mini", {"layer_types": ["full_attention"] * 34}, "no layer has rotary positions"),
        ("lara_mini", {"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got 'gelu'"),
        ("kolibri1", {"sliding_window": None}, "sliding_window: expected a whole number"),
        ("kolibri1", {"attention_bias": True}, "attention_bias: expected false, got true"),
        *(
            (
                "kimi_linear",
                {"linear_attn_config": {"kda_layers": kda, "full_attn_layers": [4]}},
                "must have each layer from 1 to 27 once",
            )
            for kda in ([1, 2, 3], [*range(28)], [*range(1, 28)], ["1"], 7)
        ),
        *(
            (
                "step3p5",
                {"layer_types": ["sliding_attention"] * 45, "sliding_window": 9, key: value},
                f"{key}: expected {done}",
            )
            for key, value, done in (
                ("use_head_wise_attn_gate", False, "true"),
                ("gating", "per-channel", "true or per-head"),
                ("moe_router_activation", "softmax", "sigmoid"),
                ("use_rope_layers", [True] * 45, "[]"),
                ("yarn_only_types", ["sliding_attention"], "['full_attention']"),
                ("hidden_act", "gelu", "silu or swish"),
                ("sliding_window", None, "a whole number"),
                ("swiglu_limits", [7.0] * 44, "a list with a number for each of 45 layers"),
                ("swiglu_limits_shared", [-7.0] * 45, "a number above 0"),
                ("moe_layers_enum", "3,x", "numbers of layers between commas"),
                ("moe_layers_enum", 3, "numbers of layers between commas"),
                ("rope_theta", [5.0] * 44 + [6.0], "a number for each layer, the same for all"),
                ("rope_theta", [5.0] * 44, "a number for each layer, the same for all"),
                ("per_layer_config", {"0": {"num_attention_heads": 8}}, "64 heads in all layers"),
                ("attention_other_setting", {"head_dim": 64}, "64 heads of 128 numbers"),
            )
        ),
        (
            "glm4v_moe",
            {"text_config": {"use_qk_norm": True}},
            "text_config.use_qk_norm: expected false",
        ),
        ("step3p5", {"num_sliding_attention_heads": 60}, "60) must be a multiple of num_key_val"),
        ("minimax", {"layer_types": ["linear_attention"] * 32}, "no layer has full attention"),
        ("minimax", {"attn_type_list": [0] * 32}, "no layer has full attention"),
        ("minimax", {"attn_type_list": [0, 1]}, "attn_type_list has 2 entries for 32 layers"),
        ("minimax", {"attn_type_list": [2] * 32}, "attn_type_list: expected a list of 0 and 1"),
        ("minimax", {"mlp_beta_factor": 0}, "mlp_beta_factor: expected a number above 0, got 0"),
        (
            "minimax",
            {"mlp_beta_factor": 2, "layernorm_mlp_beta": 3},
            "mlp_beta_factor (2) and layernorm_mlp_beta (3) contradict each other",
        ),
        ("minimax", {"postnorm": False}, "postnorm: expected true, got false"),
        (
            "minimax",
            {"shared_intermediate_size": 64},
            "shared_intermediate_size: expected 0 or [0], got 64",
        ),
        ("lfm2_moe", {"conv_L_cache": 1}, "conv_L_cache: expected a whole number from 2 to 16"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 24 layers",
        ),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 24},
            "layer_types: expected a list of full_attention and sliding_attention",
        ),
    ],
)
def test_figures_that_make_no_sense(family: str, entries: dict[str, Any], message: str) -> None:
    assert message in faults_of(minimal(family) | entries)


@pytest.mark.parametrize(
    "entry",
    [
        *({"mscale_all_dim": strength} for strength in (1e300, 10**400, float("nan"))),
        {"factor": float("inf")},
    ],
)
def test_scores_are_multiplied_by_a_number(entry: dict[str, Any]) -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0} | entry
    message = faults_of(minimal("deepseek_v3", rope_scaling=yarn))
    assert "rope_scaling: expected numbers below 1e+09 as factor and mscale_all_dim" in message


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": [["MixtralForCausalLM"]]},
        {"model_type": "llama"},
        {"architectures": None},
        {},
    ],
)
def test_other_architectures_are_refused_by_name(config: dict[str, Any]) -> None:
    named = (config.get("architectures") or [config.get("model_type")])[0]
    begin = f"m/config.json: architecture {shown(named)} is not supported; docs/"
    assert faults_of(config).startswith(begin)


def test_a_number_of_experts_that_makes_no_sense_is_listed_once() -> None:
    message = faults_of(minimal("qwen3_moe", num_experts=0))
    assert message == (
        "m/config.json: num_experts: expected a whole number from 1 to 2147483647, got 0"
    )


def test_quantised_checkpoints_are_refused() -> None:
    message = faults_of(minimal(quantization_config={"quant_method": "hqq", "bits": 4}))
    assert "quantization_config ('hqq'): such checkpoints are not read; use the model" in message


def test_what_can_be_planned_and_not_run() -> None:
    config = minimal("mixtral", hidden_act="wavy")
    read_planned_shape(config, "m/config.json")
    with pytest.raises(CheckpointError, match=r"m/config\.json: hidden_act 'wavy' is not known"):
        read_runnable_shape(config, "m/config.json")


def test_activations_with_weights_are_refused_and_no_others() -> None:
    """Each expert would have its own in files."""
    refused = []
    for name in ACT2FN:
        config = minimal("mixtral", hidden_act=name)
        try:
            read_runnable_shape(config, "m/config.json")
        except CheckpointError as error:
            assert f"hidden_act '{name}' has weights of its own" in str(error)
            refused.append(name)
    modules = {name: ACT2FN[name] for name in ACT2FN}
    assert refused == [name for name, module in modules.items() if [*module.parameters()]]


def test_models_without_experts_are_read_and_neither_planned_nor_run() -> None:
    config = minimal("qwen3_moe", decoder_sparse_step=99)
    read_shape(config, "m/config.json")
    for read in (read_planned_shape, read_runnable_shape):
        with pytest.raises(CheckpointError, match=r"m/config\.json: no layer has experts"):
            read(config, "m/config.json")


def test_every_activation_of_transformers_is_known() -> None:
    assert set(ACT2FN) <= ACTIVATIONS


def test_architecture_from_the_model_type_alone() -> None:
    shape = read_shape({"model_type": "olmoe"}, "")
    assert shape.architecture == "OlmoeForCausalLM"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[]", r"expected an object, got \[\]"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_unreadable_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_shape(tmp_path)


def transformers(family: str, **entries: Any) -> Any:
    """What transformers makes of the same config.json."""
    return described.transformers(family, **{**NEEDED.get(family, {}), **entries})


def assert_agrees(shape: ModelShape, config: Any) -> None:
    """Attribute by attribute."""
    family = config.model_type
    layers = range(config.num_hidden_layers)
    assert shape.architecture == ARCHITECTURES[family]
    assert shape.num_layers == config.num_hidden_layers
    assert shape.hidden_size == config.hidden_size
    assert shape.attention.num_heads == config.num_attention_heads
    assert shape.attention.num_kv_heads == config.num_key_value_heads
    derived = config.hidden_size // config.num_attention_heads
    if family not in LATENT:
        assert shape.attention.head_dim == (getattr(config, "head_dim", None) or derived)
    assert shape.vocab_size == config.vocab_size
    assert shape.tie_word_embeddings == config.tie_word_embeddings
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", [])
    step = getattr(config, "moe_layer_interval", step)
    first = getattr(config, "first_k_dense_replace", getattr(config, "num_dense_layers", 0))
    first = getattr(config, "moe_layer_start_index", first)
    stop = getattr(config, "moe_layer_end_index", len(layers) - 1) + 1
    kinds = getattr(config, "mlp_layer_types", ["sparse"] * len(layers))
    dense = [*dense, *(i for i, kind in enumerate(kinds) if kind == "dense")]
    moe = [i for i in layers[first:stop] if i not in dense and (i + 1) % step == 0]
    assert [i for i in layers if shape.is_moe(i)] == moe == list(shape.moe_layers)
    key = "num_experts" if hasattr(config, "num_experts") else "num_local_experts"
    assert shape.num_experts == getattr(config, key) == getattr(config.get_text_config(), key)
    assert shape.experts_per_token == config.num_experts_per_tok
    width = getattr(config, "moe_intermediate_size", None)
    assert shape.expert_width == (width or config.intermediate_size)
    of_shared = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    shared = max(getattr(config, key, 0) for key in of_shared) * (width or 0)
    shared = getattr(config, "shared_expert_intermediate_size", shared)
    shared = getattr(config, "shared_intermediate_size", shared)
    assert shape.dense_width == (config.intermediate_size if len(moe) < len(layers) else 0)
    shared = config.intermediate_size if family == "hunyuan_v1_moe" else shared
    assert shape.shared_expert_width == shared
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    slides = ("sliding_attention", *types) if family == "minimax" else ("sliding_attention",)
    windows = [window if kind in slides else None for kind in types]
    assert list(shape.sliding_windows) == windows
    recurrent = [layer for layer, kind in enumerate(types) if kind in ("linear_attention", "conv")]
    assert list(shape.recurrent_layers) == recurrent
    eps = "norm_eps" if family == "lfm2_moe" else "rms_norm_eps"
    assert shape.rms_eps == getattr(config, eps)
    assert shape.activation == getattr(config, "hidden_act", "silu")
    assert shape.max_positions == config.max_position_embeddings
    if family != "deepseek_v2":  # whatever the file says
        assert (shape.router.norm_order == 1.0) == getattr(
            config, "norm_topk_prob", family != "phimoe"
        )
    scales = (shape.embedding_scale, 1 / shape.logit_scale)
    keys = ("embedding_multiplier", "logits_scaling")
    assert scales == pytest.approx([getattr(config, key, 1.0) for key in keys])
    usual = {"alpha": 1.0, "beta": getattr(config, "residual_multiplier", 1.0)}
    residuals = shape.attention_residual, shape.recurrent_residual, shape.mlp_residual
    for part, residual in zip(("full_attn", "linear_attn", "mlp"), residuals, strict=True):
        kept, added = (getattr(config, f"{part}_{n}_factor", one) for n, one in usual.items())
        assert residual == Residual(kept=kept, added=added, keeps_normed=family == "minimax")
    assert_attention_agrees(shape, config)


def assert_attention_agrees(shape: ModelShape, config: Any) -> None:
    family, attention = config.model_type, shape.attention
    bias = getattr(config, "attention_bias", getattr(config, "use_bias", False))
    if family in LATENT:
        assert isinstance(attention, LatentAttention)
        assert attention.qkv_bias == attention.output_bias == bias
        assert attention.nope_head_dim == config.qk_nope_head_dim
        assert attention.rope_head_dim == config.qk_rope_head_dim
        assert attention.rotary_dim == config.qk_rope_head_dim * (family != "kimi_linear")
        assert attention.value_head_dim == config.v_head_dim
        assert (attention.query_rank, attention.kv_rank) == (
            config.q_lora_rank,
            config.kv_lora_rank,
        )
        # DeepSeek-V2 always does
        interleaves = getattr(config, "rope_interleave", family != "kimi_linear")
        assert attention.rotates_neighbours == interleaves
        return
    assert isinstance(attention, GroupedAttention)
    assert attention.qkv_bias == (bias or getattr(config, "qkv_bias", False))
    without = ("glm4_moe", "solar_open", "sarvam_moe")
    assert attention.output_bias == (bias and family not in without)
    per_head = (
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "hunyuan_v1_moe",
        "hy_v3",
        "dots1",
        "exaone_moe",
        "afmoe",
        "mellum",
        "lfm2_moe",
        "kolibri1",
        "flint",
        "lara_mini",
        "beam",
    )
    qk_norms = dict.fromkeys(per_head, "head")
    qk_norms |= {"olmoe": "full", "flex_olmo": "full", "minimax_m2": "full"}
    qk_norm = "head" if getattr(config, "use_qk_norm", False) else qk_norms.get(family, "none")
    assert attention.qk_norm == qk_norm
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    rotates = getattr(config, "position_embedding_type", "rope") == "rope"
    assert attention.rotary_dim == int(shape.attention.head_dim * share) * rotates
    assert attention.clip_qkv == getattr(config, "clip_qkv", None)
    assert attention.score_scale == getattr(config, "attention_multiplier", None)
