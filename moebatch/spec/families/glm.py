"""GLM-4.5, 4.6 and 4.7 (Zhipu AI)."""

from moebatch.spec.config_keys import ConfigKeys
from moebatch.spec.families.family import (
    FamilySpec,
    corrected_router,
    grouped_attention,
    usual_defaults,
)
from moebatch.spec.shape import Layers, Mlp
from moebatch.spec.tensor_names import LAYER, USUAL_EXPERTS, TensorNames, usual_roles


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """Released files hold a layer more, which foretells tokens and is not computed."""
    width, num_shared = keys.count("moe_intermediate_size"), keys.count("n_shared_experts")
    return Layers(
        attention=grouped_attention(
            keys,
            bias="attention_bias",
            qk_norm="head" if keys.flag("use_qk_norm") else "none",
            rotates_part=True,
        ),
        moe_layers=tuple(range(keys.count_or_zero("first_k_dense_replace"), num_layers)),
        expert=Mlp(width=width),
        dense=Mlp(width=keys.count("intermediate_size")),
        shared_expert=Mlp(width=num_shared * width),
        shared_expert_gate=False,
        router=corrected_router(keys),
        sliding_windows=(None,) * num_layers,
    )


GLM4_MOE = FamilySpec(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults=usual_defaults(
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        attention_bias=False,
        use_qk_norm=False,
        partial_rotary_factor=0.5,
        moe_intermediate_size=1408,
        num_experts_per_tok=8,
        n_shared_experts=1,
        num_experts=128,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    ),
    spelling={"num_experts": "n_routed_experts"},
    layers=_layers,
    names=TensorNames(
        roles=usual_roles(shared="mlp.shared_experts")
        | {"router_correction": (LAYER + "mlp.gate.e_score_correction_bias",)},
        experts=USUAL_EXPERTS,
    ),
)
