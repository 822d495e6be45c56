"""MiMo-V2-Flash (Xiaomi): most layers slide, with scores for sinks and twice the heads of keys."""

from dataclasses import replace

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    SLIDING,
    Windows,
    by_layer_types,
    by_mlp_types,
    in_two_ways,
)
from moebatch.spec.families.parts import corrected_router, grouped_attention, mlps
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """Released files hold layers more, which foretell tokens and are not computed."""
    windows = _windows(keys, num_layers)
    sparse = by_mlp_types(keys, num_layers, range(1, num_layers))
    return Layers(
        **in_two_ways(windows, _sliding_attention(keys), _attention(keys, FULL)),
        **mlps(keys, num_layers, sparse),
        router=corrected_router(keys),
    )


def _windows(keys: ConfigKeys, num_layers: int) -> Windows:
    """``sliding_window_size`` of released files leaves out the token itself."""
    windows = by_layer_types(keys, num_layers, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    others = keys.count_or_none("sliding_window_size")
    if others is None:
        return windows
    return tuple(None if window is None else others + 1 for window in windows)


def _attention(keys: ConfigKeys, kind: str) -> GroupedAttention:
    return grouped_attention(
        keys,
        qkv_bias="attention_bias",
        rotates_part=True,
        value_head_dim=keys.count("v_head_dim"),
        value_scale=keys.positive_or_none("attention_value_scale") or 1.0,
        rotary=kind,
    )


def _sliding_attention(keys: ConfigKeys) -> GroupedAttention:
    found = _attention(keys, SLIDING)
    kv_heads = 2 * found.num_kv_heads
    if found.num_heads % kv_heads:
        keys.wrong(
            "num_key_value_heads",
            f"num_attention_heads ({found.num_heads}) must be a multiple of {kv_heads}, twice "
            "num_key_value_heads, which layers that slide have",
        )
    return replace(found, num_kv_heads=kv_heads, has_sink_scores=True)


MIMO_V2_FLASH = FamilySpec(
    architecture="MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    layers=_layers,
    rotary_type="mixtral",
    names=usual_names({"sink_scores": ("self_attn.attention_sink_bias", "self_attn.sinks")}),
)
