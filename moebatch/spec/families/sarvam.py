"""Sarvam-30B, which is built as GLM-4.5 is, and Sarvam-105B, as DeepSeek-V3 is (Sarvam AI)."""

from dataclasses import replace

from moebatch.spec.families.deepseek import DEEPSEEK_V3, v3_layers
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.glm import GLM4_MOE, glm4_layers
from moebatch.spec.model.tensor_names import LAYER

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
    layers=v3_layers,
    names=DEEPSEEK_V3.names,
)
