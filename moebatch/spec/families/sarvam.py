"""Sarvam-30B, which is built as GLM-4.5 is, and Sarvam-105B, as DeepSeek-V3 is (Sarvam AI)."""

from dataclasses import replace

from moebatch.spec.families.deepseek import DEEPSEEK_V3, v3_layers
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.glm import GLM4_MOE, glm4_layers
from moebatch.spec.model.tensor_names import LAYER

_SYNONYMS = {
    "num_experts": ("num_local_experts", "num_experts"),
    "n_shared_experts": ("num_shared_experts",),
}
_RELEASED = {
    "embedding": "model.word_embeddings.weight",
    "qkv": LAYER + "attention.query_key_value.weight",
    "qkv_bias": LAYER + "attention.query_key_value.bias",
    "o": LAYER + "attention.dense.weight",
    "q_norm": LAYER + "attention.query_layernorm.weight",
    "k_norm": LAYER + "attention.key_layernorm.weight",
    "router_correction": LAYER + "mlp.gate.expert_bias",
}
"""Other names than those that transformers has in memory."""

SARVAM_MOE = FamilySpec(
    architecture="SarvamMoEForCausalLM",
    model_type="sarvam_moe",
    runs_as="Glm4MoeForCausalLM",
    defaults={
        key: value for key, value in GLM4_MOE.defaults.items() if key != "partial_rotary_factor"
    }
    | {
        "vocab_size": 262144,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 19,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    spelling=GLM4_MOE.spelling,
    synonyms=_SYNONYMS | {"attention_bias": ("use_qkv_bias",)},
    layers=glm4_layers,
    names=replace(
        GLM4_MOE.names,
        roles=dict(GLM4_MOE.names.roles)
        | {role: (name, *GLM4_MOE.names.roles.get(role, ())) for role, name in _RELEASED.items()},
        joined={"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")},
    ),
)
SARVAM_MLA = FamilySpec(
    architecture="SarvamMLAForCausalLM",
    model_type="sarvam_mla",
    runs_as="DeepseekV3ForCausalLM",
    defaults=dict(DEEPSEEK_V3.defaults)
    | {
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "num_experts": 128,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    spelling=DEEPSEEK_V3.spelling,
    synonyms=_SYNONYMS,
    layers=v3_layers,
    names=DEEPSEEK_V3.names,
)
