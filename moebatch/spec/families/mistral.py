"""Mistral 4 (Mistral AI), alone and beside a model that sees: DeepSeek's layers, with other routing
and queries that grow with their positions."""

from dataclasses import replace

from moebatch.spec.families.deepseek import DEEPSEEK_V3, latent_attention, latent_layers
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import expert_groups, norm_order
from moebatch.spec.model.attention import Temperature
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import AROUND_MODEL, IN_MODEL

_TYPE = "mistral4"


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    if keys.value("text_type") != _TYPE:
        keys.fault("text_type", f"{_TYPE}, since others have no experts", keys.value("text_type"))
    attention = latent_attention(keys, rotates_neighbours=keys.flag("rope_interleave"))
    router = Router(
        groups=expert_groups(keys, num_scored=2),
        norm_order=norm_order(keys),
        least_norm=1e-20,
        scale=keys.positive("routed_scaling_factor"),
        has_exact_weights=True,
    )
    attention = replace(attention, temperature=_temperature(keys))
    return latent_layers(keys, num_layers, attention, router)


def _temperature(keys: ConfigKeys) -> Temperature:
    """``llama_4_scaling_beta`` of the rotary parameters, without which transformers fails."""
    rope = keys.rope()
    strength, step = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if type(step) is int and step > 0 and isinstance(strength, int | float) and strength > 0:
        return Temperature(step, float(strength), first=0)
    keys.fault(
        "rope_parameters",
        "llama_4_scaling_beta and original_max_position_embeddings above 0",
        rope,
    )
    return Temperature(1, 1.0)


MISTRAL4 = FamilySpec(
    architecture="Mistral4ForCausalLM",
    model_type=_TYPE,
    defaults={
        "text_type": _TYPE,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    spelling={"text_type": "model_type"},
    layers=_layers,
    names=DEEPSEEK_V3.names,
    rotary_type=DEEPSEEK_V3.model_type,
)
MISTRAL3 = MISTRAL4.beside_others(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    defaults=dict(MISTRAL4.defaults) | {"text_type": "mistral"},
    names=MISTRAL4.names.also_under(AROUND_MODEL).also_under(IN_MODEL),
)
"""As it is released. Images are not read."""
