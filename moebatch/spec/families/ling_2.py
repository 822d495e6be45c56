"""Ling 2.0, whose layers are those of GLM-4.5, Ling 1.5, whose layers are those of DeepSeek-MoE,
and Ring, which is either of them (inclusionAI)."""

from collections.abc import Mapping, Sequence

from moebatch.spec.families.deepseek import latent_layers
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.glm import glm4_layers
from moebatch.spec.families.ling import SHARED_WIDTH, require_shared_width
from moebatch.spec.families.parts import grouped_attention, softmax_router
from moebatch.spec.families.sarvam import SARVAM_MOE
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers

_COMPUTED: Mapping[str, Sequence[object]] = {
    "norm_head": (False,),
    "use_bias": (False,),
    "use_sliding_window": (False,),
}
_CORRECTED: Mapping[str, Sequence[object]] = {
    "moe_router_enable_expert_bias": (True,),
    "norm_topk_prob": (True,),
    "score_function": ("sigmoid",),
}
_SPELLING = {"n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"}


def _second(keys: ConfigKeys, num_layers: int) -> Layers:
    require_shared_width(keys)
    return glm4_layers(keys, num_layers)


def _first(keys: ConfigKeys, num_layers: int) -> Layers:
    attention = grouped_attention(keys, qkv_bias="attention_bias")
    return latent_layers(keys, num_layers, attention, softmax_router(keys))


BAILING_MOE_V2 = FamilySpec(
    architecture="BailingMoeV2ForCausalLM",
    model_type="bailing_moe_v2",
    other_types=("bailing_moe",),
    defaults={"attention_bias": False, "norm_topk_prob": True},
    spelling=_SPELLING | SHARED_WIDTH,
    computed={**_COMPUTED, **_CORRECTED},
    layers=_second,
    rotary_type="llama",
    names=SARVAM_MOE.names,
)
BAILING_MOE = FamilySpec(
    architecture="BailingMoeForCausalLM",
    model_type="bailing_moe",
    defaults={"attention_bias": False},
    spelling=_SPELLING,
    computed=_COMPUTED,
    layers=_first,
    rotary_type="llama",
    names=SARVAM_MOE.names,
)
"""Files name the classes of their own code, which is not run. Layers behind the last one, which
foretell tokens, are not read."""
