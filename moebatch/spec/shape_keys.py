"""The keys of ``config.json`` per family: what they mean, and what holds where they are absent.

Released configurations omit what equals the default of the family's class in transformers, so
these defaults are part of the format. Keys have the names that most families use; a family that
writes them otherwise says so in its ``spelling``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

_MXFP4_BITS = 4 + 8 / 32  # a scale of one byte for each block of 32 numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyKeys:
    """How one architecture spells its shape."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    """Value of every key of the family that a file may leave out."""
    expert_width_key: str
    qk_norm: Literal["none", "head", "full"]
    spelling: Mapping[str, str] = field(default_factory=dict)
    """Where the family keeps a key under another name; ``ffn_config.moe_top_k`` is nested."""
    runnable: bool = True
    """Whether moebatch can run it; it can plan all."""
    qkv_bias_key: str | None = None
    output_bias_key: str | None = None
    dense_layers: Literal["none", "step", "leading"] = "none"
    """Layers without experts: none, all but every ``decoder_sparse_step``-th and those in
    ``mlp_only_layers``, or the ``first_k_dense_replace`` first."""
    always_norm_topk: bool = False
    windows: Literal["none", "all", "switched", "layered", "alternating"] = "none"
    """``sliding_window`` is ignored, holds for all layers, holds if ``use_sliding_window``, holds
    then for the layers that ``layer_types`` or ``max_window_layers`` name, or holds for those in
    ``layer_types`` and else for every other layer from the first."""
    shared_experts: Literal["none", "gated", "counted"] = "none"
    """No shared expert; one of ``shared_expert_intermediate_size`` that a sigmoid gate weighs; or
    ``n_shared_experts`` as wide as a routed one and without such a gate."""
    latent_attention: bool = False
    moe_bias: bool = False
    """Routers and experts have biases."""
    attention_sinks: bool = False
    expert_bits: Mapping[str, float] = field(default_factory=dict)
    """Bits per number of an expert's matrices, by the quantisations in which it is released."""


def _defaults(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType({"hidden_act": "silu", "tie_word_embeddings": False} | values)


_QWEN = _defaults(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=24,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    use_sliding_window=False,
    sliding_window=4096,
    decoder_sparse_step=1,
    mlp_only_layers=(),
    norm_topk_prob=False,
)

_DEEPSEEK = _defaults(
    vocab_size=102400,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    attention_bias=False,
    moe_intermediate_size=1407,
    num_experts_per_tok=None,
    norm_topk_prob=False,
    first_k_dense_replace=0,
    moe_layer_freq=1,
)

_FAMILIES = (
    FamilyKeys(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        defaults=_defaults(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            sliding_window=None,
            num_experts_per_tok=2,
            num_experts=8,
        ),
        expert_width_key="intermediate_size",
        qk_norm="none",
        always_norm_topk=True,
        windows="all",
    ),
    FamilyKeys(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        defaults={
            **_QWEN,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_window_layers": 28,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        expert_width_key="moe_intermediate_size",
        qk_norm="none",
        qkv_bias_key="qkv_bias",
        dense_layers="step",
        windows="layered",
        shared_experts="gated",
    ),
    FamilyKeys(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        defaults={
            **_QWEN,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        expert_width_key="moe_intermediate_size",
        qk_norm="head",
        qkv_bias_key="attention_bias",
        output_bias_key="attention_bias",
        dense_layers="step",
        windows="switched",
    ),
    FamilyKeys(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        defaults=_defaults(
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=None,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            attention_bias=False,
            clip_qkv=None,
            num_experts_per_tok=8,
            num_experts=64,
            norm_topk_prob=False,
        ),
        expert_width_key="intermediate_size",
        qk_norm="full",
        qkv_bias_key="attention_bias",
        output_bias_key="attention_bias",
    ),
    FamilyKeys(
        architecture="DbrxForCausalLM",
        model_type="dbrx",
        runnable=False,
        defaults=_defaults(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,  # of its layer norms; no key says so
            clip_qkv=None,
            num_experts_per_tok=1,
            num_experts=4,
        ),
        spelling={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "num_key_value_heads": "attn_config.kv_n_heads",
            "clip_qkv": "attn_config.clip_qkv",
            "intermediate_size": "ffn_config.ffn_hidden_size",
            "num_experts": "ffn_config.moe_num_experts",
            "num_experts_per_tok": "ffn_config.moe_top_k",
            "hidden_act": "ffn_config.ffn_act_fn.name",
        },
        expert_width_key="intermediate_size",
        qk_norm="none",
        always_norm_topk=True,
    ),
    FamilyKeys(
        architecture="DeepseekForCausalLM",
        model_type="deepseek",
        runnable=False,
        defaults={
            **_DEEPSEEK,
            "num_hidden_layers": 30,
            "n_shared_experts": None,
            "num_experts": None,
        },
        spelling={"num_experts": "n_routed_experts"},
        expert_width_key="moe_intermediate_size",
        qk_norm="none",
        qkv_bias_key="attention_bias",
        output_bias_key="attention_bias",
        dense_layers="leading",
        shared_experts="counted",
    ),
    FamilyKeys(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        runnable=False,
        defaults={
            **_DEEPSEEK,
            "num_hidden_layers": 32,
            "n_shared_experts": 2,
            "num_experts": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "head_dim": 64,
            "v_head_dim": 128,
        },
        # Only the part of a head that has rotary positions is bound by the rules of head sizes.
        spelling={"num_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        expert_width_key="moe_intermediate_size",
        qk_norm="none",
        qkv_bias_key="attention_bias",
        output_bias_key="attention_bias",
        dense_layers="leading",
        shared_experts="counted",
        latent_attention=True,
    ),
    FamilyKeys(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        runnable=False,
        defaults=_defaults(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            attention_bias=True,
            sliding_window=128,
            num_experts_per_tok=4,
            num_experts=128,
            torch_dtype="bfloat16",  # which its released files leave out
        ),
        expert_width_key="intermediate_size",
        qk_norm="none",
        qkv_bias_key="attention_bias",
        output_bias_key="attention_bias",
        always_norm_topk=True,
        windows="alternating",
        moe_bias=True,
        attention_sinks=True,
        expert_bits={"mxfp4": _MXFP4_BITS},
    ),
)

FAMILY_KEYS: Mapping[str, FamilyKeys] = MappingProxyType(
    {family.architecture: family for family in _FAMILIES}
)
RUNNABLE = tuple(name for name, family in FAMILY_KEYS.items() if family.runnable)
"""Architectures that the decoder computes; those of the others can only be planned."""
