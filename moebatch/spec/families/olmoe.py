"""OLMoE, and FlexOlmo behind it (Ai2)."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import grouped_attention, mlps, softmax_router
from moebatch.spec.model.blocks import Norm
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(
            keys,
            biases="attention_bias",
            fills_hidden=True,
            qk_norm="full",
            clip_qkv=keys.positive_or_none("clip_qkv"),
        ),
        **mlps(keys, num_layers, width="intermediate_size"),
        router=softmax_router(keys),
    )


def _flex(keys: ConfigKeys, num_layers: int) -> Layers:
    """What attention and experts have made is normed, and not what they take."""
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias", qk_norm="full"),
        **mlps(keys, num_layers, width="intermediate_size"),
        router=softmax_router(keys),
        norm=Norm(rounds_once=True),
        norms=("attention_out_norm", "mlp_out_norm"),
    )


OLMOE = FamilySpec(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    layers=_layers,
    names=usual_names(),
)
FLEX_OLMO = FamilySpec(
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    layers=_flex,
    names=usual_names(
        {
            "attention_out_norm": "post_attention_layernorm.weight",
            "mlp_out_norm": "post_feedforward_layernorm.weight",
        }
    ),
)
