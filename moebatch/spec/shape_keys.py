"""The keys of ``config.json`` per family: what they mean, and what holds where they are absent.

Released configurations omit what equals the default of the family's class in transformers, so
these defaults are part of the format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyKeys:
    """How one architecture spells its shape."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    """Value of every key of the family that a file may leave out."""
    expert_width_key: str
    qk_norm: Literal["none", "head", "full"]
    qkv_bias_key: str | None = None
    output_bias_key: str | None = None
    has_dense_layers: bool = False
    always_norm_topk: bool = False
    windows: Literal["none", "all", "switched", "layered"] = "none"
    """``sliding_window`` is ignored, holds for all layers, holds if ``use_sliding_window``, or
    holds then for the layers that ``layer_types`` or ``max_window_layers`` name."""


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
        has_dense_layers=True,
        windows="layered",
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
        has_dense_layers=True,
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
)

FAMILY_KEYS: Mapping[str, FamilyKeys] = MappingProxyType(
    {family.architecture: family for family in _FAMILIES}
)
