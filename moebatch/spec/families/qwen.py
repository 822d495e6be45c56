"""Qwen2-MoE and Qwen3-MoE, and the text of Qwen3-VL-MoE and of Qwen3-Omni's thinker (Alibaba); and
Mellum 2 (JetBrains), whose layers are those of Qwen3-MoE, and the text of InternVL 3.5 (OpenGVLab),
which is Qwen3-MoE in the larger ones."""

from dataclasses import replace

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    SLIDING,
    Windows,
    by_layer_types,
    by_mlp_types,
    everywhere,
    in_two_ways,
)
from moebatch.spec.families.parts import grouped_attention, mlps, softmax_router
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import (
    AROUND_MODEL,
    IN_MODEL,
    STACKED_EXPERTS,
    USUAL_EXPERTS,
    usual_names,
)

_QWEN3 = "qwen3_moe"


def _qwen2(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys, qkv_bias="qkv_bias"),
        **mlps(
            keys,
            num_layers,
            sparse_layers(keys, num_layers),
            shared="shared_expert_intermediate_size",
        ),
        shared_expert_gate=True,
        router=softmax_router(keys),
        sliding_windows=_qwen2_windows(keys, num_layers),
    )


def _qwen3(keys: ConfigKeys, num_layers: int) -> Layers:
    slides = keys.flag("use_sliding_window")
    windows = everywhere(keys, num_layers) if slides else (None,) * num_layers
    return replace(_qwen3_omni(keys, num_layers), sliding_windows=windows)


def _intern(keys: ConfigKeys, num_layers: int) -> Layers:
    if keys.value("text_type") != _QWEN3:
        expected = f"{_QWEN3}, the only text with experts that is read of this architecture"
        keys.fault("text_type", expected, keys.value("text_type"))
    return _qwen3(keys, num_layers)


def _qwen3_vl(keys: ConfigKeys, num_layers: int) -> Layers:
    return _layers(keys, num_layers, Router(norm_order=1.0))


def _qwen3_omni(keys: ConfigKeys, num_layers: int) -> Layers:
    return _layers(keys, num_layers, softmax_router(keys))


def _layers(keys: ConfigKeys, num_layers: int, router: Router) -> Layers:
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias", qk_norm="head"),
        **mlps(keys, num_layers, sparse_layers(keys, num_layers)),
        router=router,
    )


def _mellum(keys: ConfigKeys, num_layers: int) -> Layers:
    """Layers with a sliding window rotate otherwise than those that see everything."""
    windows = by_layer_types(keys, num_layers, lambda layer: False)
    full = grouped_attention(keys, biases="attention_bias", qk_norm="head", rotary=FULL)
    return Layers(
        **in_two_ways(windows, replace(full, rotary=SLIDING), full),
        **mlps(keys, num_layers, by_mlp_types(keys, num_layers, range(num_layers))),
        router=softmax_router(keys),
    )


def sparse_layers(keys: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """Every ``decoder_sparse_step``-th that is not in ``mlp_only_layers``."""
    step = keys.count("decoder_sparse_step")
    dense = keys.value("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or any(type(layer) is not int for layer in dense):
        keys.fault("mlp_only_layers", "a list of layer numbers", dense)
        dense = ()
    others = frozenset(dense)
    return tuple(layer for layer in range(step - 1, num_layers, step) if layer not in others)


def _qwen2_windows(keys: ConfigKeys, num_layers: int) -> Windows:
    """transformers lets only every other layer below ``max_window_layers`` slide."""
    if not keys.flag("use_sliding_window"):
        return (None,) * num_layers
    below = keys.count_or_zero("max_window_layers")
    return by_layer_types(keys, num_layers, lambda layer: layer % 2 == 0 and layer < below)


_NAMES = usual_names()

QWEN2_MOE = FamilySpec(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    layers=_qwen2,
    names=_NAMES,
)
QWEN3_MOE = FamilySpec(
    architecture="Qwen3MoeForCausalLM",
    model_type=_QWEN3,
    layers=_qwen3,
    names=_NAMES,
)
INTERN_VL = QWEN3_MOE.beside_others(
    "InternVLForConditionalGeneration",
    "internvl",
    defaults={"text_type": "qwen2", "tie_word_embeddings": True},
    spelling={"text_type": "model_type"},
    layers=_intern,
    names=_NAMES.also_under(AROUND_MODEL).also_under(IN_MODEL),
)
INTERN_VL_CHAT = replace(
    INTERN_VL, architecture="InternVLChatModel", model_type="internvl_chat", within="llm_config."
)
"""The latter is the class of code of its own, which is not run. Images are not read."""
MELLUM = FamilySpec(
    architecture="MellumForCausalLM",
    model_type="mellum",
    layers=_mellum,
    rotary_type="qwen3_moe",
    names=_NAMES,
)
_BY_COLUMNS = STACKED_EXPERTS.across("gate", "up", "down")
QWEN3_VL_MOE = FamilySpec(
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    config_type="qwen3_vl_moe_text",
    defaults={"tie_word_embeddings": False},
    within="text_config.",
    layers=_qwen3_vl,
    names=usual_names(experts=(_BY_COLUMNS, *USUAL_EXPERTS)).also_under(IN_MODEL),
)
"""Images and videos are not read: its vision tensors are left alone. Experts are [E, D, 2F] and
[E, F, D]."""
QWEN3_OMNI_THINKER = replace(
    QWEN3_VL_MOE,
    architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
    model_type="qwen3_omni_moe_thinker",
    config_type="qwen3_omni_moe_text",
    layers=_qwen3_omni,
    names=_NAMES.also_under(IN_MODEL),
)
QWEN3_OMNI_MOE = replace(
    QWEN3_OMNI_THINKER,
    architecture="Qwen3OmniMoeForConditionalGeneration",
    model_type="qwen3_omni_moe",
    within="thinker_config.text_config.",
    names=_NAMES.also_under({"model": "thinker.model", "lm_head": "thinker.lm_head"}),
)
"""As released: what speaks beside it is left alone, as is what sees and what hears."""
