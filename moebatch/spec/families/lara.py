"""Lara 4 Mini (Translated): two of five layers recur by Gated DeltaNet, two slide and rotate, and
one does neither."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    LINEAR,
    SLIDING,
    layer_types,
    rotated_by_windows,
    windows_of,
)
from moebatch.spec.families.parts import grouped_attention, mlps, norm_order
from moebatch.spec.families.qwen_delta import DELTA_NAMES, gated_delta
from moebatch.spec.families.recurring import recurring
from moebatch.spec.model.blocks import Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import STACKED_EXPERTS, usual_names

_PERIOD = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    usual = [_PERIOD[layer % len(_PERIOD)] for layer in range(num_layers)]
    recurrent = recurring(keys, usual, gated_delta, attend=(FULL, SLIDING))
    windows = windows_of(keys, layer_types(keys, usual, known=(LINEAR, SLIDING, FULL)))
    attention = grouped_attention(keys, biases="attention_bias", qk_norm="head")
    return Layers(
        **rotated_by_windows(keys, attention, windows, recurrent=recurrent["recurrent_layers"]),
        **recurrent,
        **mlps(keys, num_layers, shared="shared_expert_intermediate_size"),
        router=Router(norm_order=norm_order(keys), has_exact_logits=True),
        norm=Norm(rounds_once=True),
    )


LARA_MINI = FamilySpec(
    architecture="LaraMiniForCausalLM",
    model_type="lara_mini",
    layers=_layers,
    names=usual_names(
        {
            **DELTA_NAMES,
            "recurrent_norm": ("linear_attn.out_norm.weight", "linear_attn.norm.weight"),
        },
        joined={"recurrent_in": ("delta_qkv", "delta_z", "delta_b", "delta_a")},
        experts=(STACKED_EXPERTS,),
    ),
)
