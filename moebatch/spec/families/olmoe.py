"""OLMoE, and FlexOlmo behind it (Ai2)."""

from moebatch.spec.families.family import (
    FamilySpec,
    grouped_attention,
    softmax_router,
    usual_defaults,
)
from moebatch.spec.model.blocks import Mlp, Norm
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import LAYER, USUAL_EXPERTS, TensorNames, usual_roles


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(
            keys,
            biases="attention_bias",
            fills_hidden=True,
            qk_norm="full",
            clip_qkv=keys.positive_or_none("clip_qkv"),
        ),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("intermediate_size")),
        router=softmax_router(keys),
    )


def _flex(keys: ConfigKeys, num_layers: int) -> Layers:
    """What attention and experts have made is normed, and not what they take."""
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias", qk_norm="full"),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("intermediate_size")),
        router=softmax_router(keys),
        norm=Norm(rounds_once=True),
        norms=("attention_out_norm", "mlp_out_norm"),
    )


OLMOE = FamilySpec(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    defaults=usual_defaults(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        num_experts_per_tok=8,
        num_experts=64,
        norm_topk_prob=False,
    ),
    layers=_layers,
    names=TensorNames(roles=usual_roles(), experts=USUAL_EXPERTS),
)
FLEX_OLMO = FamilySpec(
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    defaults=usual_defaults(
        vocab_size=100352,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        num_experts_per_tok=5,
        num_experts=7,
        norm_topk_prob=False,
    ),
    layers=_flex,
    names=TensorNames(
        roles=usual_roles()
        | {
            "attention_out_norm": (LAYER + "post_attention_layernorm.weight",),
            "mlp_out_norm": (LAYER + "post_feedforward_layernorm.weight",),
        },
        experts=USUAL_EXPERTS,
    ),
)
