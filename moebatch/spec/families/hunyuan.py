"""Hunyuan-A13B, and Hy3 behind it (Tencent)."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_mlp_types
from moebatch.spec.families.parts import grouped_attention, mlps, sigmoid_router
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names


def _v1(keys: ConfigKeys, num_layers: int) -> Layers:
    """Like transformers, passes over what files say of shared experts and norms: all have both."""
    return Layers(
        attention=grouped_attention(
            keys, biases="attention_bias", qk_norm="head", norms_rotated=True
        ),
        **mlps(keys, num_layers, width="intermediate_size", shared="intermediate_size"),
        router=Router(norm_order=1.0, has_exact_logits=True, has_exact_weights=True),
    )


def _v3(keys: ConfigKeys, num_layers: int) -> Layers:
    """Released files hold a layer more, which foretells tokens and is not computed."""
    sparse = by_mlp_types(keys, num_layers, range(1, num_layers))
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias", qk_norm="head"),
        **mlps(keys, num_layers, sparse, num_shared="num_shared_experts", biases="mlp_bias"),
        router=sigmoid_router(
            least_norm=1e-20,
            scale=keys.positive("router_scaling_factor"),
            has_exact_logits=True,
        ),
    )


HUNYUAN_V1_MOE = FamilySpec(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    by_layer=("num_experts", "num_experts_per_tok"),
    rotary_keys=("alpha",),
    layers=_v1,
    names=usual_names(
        {
            "router": "mlp.gate.wg.weight",
            "q_norm": "self_attn.query_layernorm.weight",
            "k_norm": "self_attn.key_layernorm.weight",
        },
        shared=("mlp.shared_mlp",),
    ),
)
HY_V3 = FamilySpec(
    architecture="HYV3ForCausalLM",
    model_type="hy_v3",
    layers=_v3,
    names=usual_names(
        {
            "router": ("mlp.router.gate.weight", "mlp.gate.weight"),
            "router_correction": ("mlp.expert_bias", "mlp.e_score_correction_bias"),
        },
        shared=("mlp.shared_mlp", "mlp.shared_experts"),
    ),
)
"""Names of released files, and of those that transformers holds in memory."""
