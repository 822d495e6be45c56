"""Lara 4 Mini (Translated): two of five layers recur by Gated DeltaNet, two slide and rotate, and
one does neither."""

from moebatch.spec.families.family import (
    FamilySpec,
    grouped_attention,
    layer_types,
    recurrent_layers,
    rotated_by_windows,
)
from moebatch.spec.families.qwen_delta import DELTA_NAMES, gated_delta
from moebatch.spec.model.blocks import Mlp, Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import STACKED_EXPERTS, usual_names

_KINDS = _LINEAR, _SLIDING, _FULL = ("linear_attention", "sliding_attention", "full_attention")
_PERIOD = (_LINEAR, _SLIDING, _LINEAR, _FULL, _SLIDING)


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    usual = [_PERIOD[layer % len(_PERIOD)] for layer in range(num_layers)]
    recurrent = recurrent_layers(keys, usual, recur=(_LINEAR,), attend=(_FULL, _SLIDING))
    window = keys.count("sliding_window")
    types = layer_types(keys, usual, known=_KINDS)
    windows = tuple(window if kind == _SLIDING else None for kind in types)
    attention = grouped_attention(keys, biases="attention_bias", qk_norm="head")
    return Layers(
        **rotated_by_windows(keys, attention, windows, recurrent=recurrent),
        recurrence=gated_delta(keys, is_grouped=False) if recurrent else None,
        recurrent_layers=recurrent,
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("moe_intermediate_size")),
        shared_expert=Mlp(width=keys.count("shared_expert_intermediate_size")),
        router=Router(
            norm_order=1.0 if keys.flag("norm_topk_prob") else None, has_exact_logits=True
        ),
        norm=Norm(rounds_once=True),
    )


LARA_MINI = FamilySpec(
    architecture="LaraMiniForCausalLM",
    model_type="lara_mini",
    layers=_layers,
    names=usual_names(
        {
            **DELTA_NAMES,
            "recurrent_in": "linear_attn.in_proj.weight",
            "recurrent_norm": ("linear_attn.out_norm.weight", "linear_attn.norm.weight"),
        },
        joined={"recurrent_in": ("delta_qkv", "delta_z", "delta_b", "delta_a")},
        experts=(STACKED_EXPERTS,),
    ),
)
