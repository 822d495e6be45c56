"""Ling 3.0 (inclusionAI): most layers recur, by Kimi Delta Attention whose fading has an end; the
last of each group attends to latents, and gates what its heads put out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moebatch.spec.families.deepseek import latent_attention, latent_layers
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kimi import OF_DELTA
from moebatch.spec.families.kinds import FULL, LINEAR
from moebatch.spec.families.parts import clamps_by_layer, corrected_router
from moebatch.spec.families.recurring import (
    alike_heads,
    conv_width,
    least_fading,
    recurring,
    require_silu,
)
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import ChannelDelta
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import OF_LATENTS, usual_names

SHARED_WIDTH = {"shared_width": "moe_shared_expert_intermediate_size"}
_COMPUTED: Mapping[str, Sequence[object]] = {
    "gated_attention_proj_granularity_type": ("head_wise",),
    "linear_attention": ("kda",),
    "moe_router_enable_expert_bias": (True,),
    "no_kda_lora": (True,),
    "num_kv_heads_for_linear_attn": (0,),
    "rope_interleave": (True,),
    "scale_router_input": (False,),
    "score_function": ("sigmoid",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "up_proj_norm": (False,),
    "use_bias": (False,),
    "use_kda_lora": (False,),
    "use_mla_nope": (False,),
    "use_nGPT": (False,),
    "use_qkv_bias": (False,),
    "value_norm": (False,),
}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """Released files hold layers more, which foretell tokens and are not computed; and limits of
    what experts and the shared one compute, which transformers passes over."""
    require_shared_width(keys)
    attention = latent_attention(keys, rotates_neighbours=True)
    gated = replace(attention, gate="of heads")
    layers = latent_layers(keys, num_layers, gated, corrected_router(keys))
    of_shared = clamps_by_layer(keys, "share_expert_swiglu_limit_list", num_layers)
    return replace(
        layers,
        **recurring(keys, _usual_types(keys, num_layers), _delta),
        expert_clamps=clamps_by_layer(keys, "expert_swiglu_limit_list", num_layers),
        mlp_clamps=tuple(
            clamp if layer in layers.moe_layers else None for layer, clamp in enumerate(of_shared)
        ),
    )


def require_shared_width(keys: ConfigKeys) -> None:
    """Notes a fault where a shared expert is not as wide as the others."""
    width = keys.count("moe_intermediate_size")
    if keys.value("shared_width") not in (None, width):
        keys.fault("shared_width", f"{width} as moe_intermediate_size", keys.value("shared_width"))


def _usual_types(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    """What layers are where ``layer_types`` says nothing."""
    size = keys.count("layer_group_size")
    if num_layers % size and keys.value("layer_types") is None:
        keys.wrong(
            "layer_group_size",
            f"layer_group_size ({size}) must divide num_hidden_layers ({num_layers}) where "
            "layer_types does not say which layers attend",
        )
    return [LINEAR if (layer + 1) % size else FULL for layer in range(num_layers)]


def _delta(keys: ConfigKeys) -> ChannelDelta:
    """Sizes are those of attention, unless transformers has written them."""
    require_silu(keys)
    heads = keys.count_or_none("linear_num_heads") or keys.count("num_attention_heads")
    head_dim = keys.count_or_none("linear_head_dim") or keys.count("head_dim")
    conv = "linear_conv_kernel_dim"
    if keys.value(conv) is None:
        conv = "short_conv_kernel_size"
    return ChannelDelta(
        **alike_heads(heads, head_dim),
        conv_width=conv_width(keys, conv),
        rank=None,
        least_fading=least_fading(keys, "kda_lower_bound") if keys.flag("kda_safe_gate") else None,
    )


_NAMES_OF_ATTENTION = {
    **{role: (name,) for role, name in (OF_LATENTS | OF_DELTA).items()},
    "q": ("q_proj.weight",),
    "output_gate": ("g_proj.weight",),
    "delta_z": ("g_proj.weight",),
    "delta_a": ("f_proj.weight",),
    "o": ("dense.weight",),
    "o_bias": ("dense.bias",),
    "recurrent_out": ("o_proj.weight", "dense.weight"),
}
"""The last is what transformers writes."""

BAILING_HYBRID = FamilySpec(
    architecture="BailingHybridForCausalLM",
    model_type="bailing_hybrid",
    spelling=SHARED_WIDTH,
    computed=_COMPUTED,
    layers=_layers,
    names=usual_names(
        {
            **{
                role: [f"attention.{name}" for name in names]
                for role, names in _NAMES_OF_ATTENTION.items()
            },
            "router_correction": "mlp.gate.expert_bias",
        },
        shared=("mlp.shared_experts",),
        others={"embedding": ("model.word_embeddings.weight",)},
    ),
)
BAILING_MOE_V3 = replace(BAILING_HYBRID, architecture="BailingMoeV3ForCausalLM")
"""Released files name the class of their own code, which is not run."""
