"""Qwen3-Next and Qwen3.5-MoE, whose text models Qwen3.6-MoE has as well (Alibaba): three of four
layers recur."""

from dataclasses import replace

from moebatch.spec.families.family import (
    FamilySpec,
    grouped_attention,
    recurrent_layers,
    require_silu,
    softmax_router,
)
from moebatch.spec.families.qwen import sparse_layers
from moebatch.spec.model.blocks import Mlp, Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import MOST_SEEN, GatedDelta
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_FULL, _LINEAR = "full_attention", "linear_attention"


def _next(keys: ConfigKeys, num_layers: int) -> Layers:
    return replace(
        _layers(keys, num_layers, is_grouped=True),
        moe_layers=sparse_layers(keys, num_layers),
        dense=Mlp(width=keys.count("intermediate_size")),
        router=softmax_router(keys),
    )


def _qwen3_5(keys: ConfigKeys, num_layers: int) -> Layers:
    return _layers(keys, num_layers, is_grouped=False)


def _layers(keys: ConfigKeys, num_layers: int, *, is_grouped: bool) -> Layers:
    recurrent = _recurrent_layers(keys, num_layers)
    return Layers(
        attention=grouped_attention(
            keys, biases="attention_bias", rotates_part=True, qk_norm="head", gate="with queries"
        ),
        norm=Norm(counts_from_one=True),
        recurrence=gated_delta(keys, is_grouped=is_grouped) if recurrent else None,
        recurrent_layers=recurrent,
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("moe_intermediate_size")),
        shared_expert=Mlp(width=keys.count("shared_expert_intermediate_size")),
        shared_expert_gate=True,
        router=Router(norm_order=1.0),
    )


def _recurrent_layers(keys: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """As ``layer_types`` says, or all but every ``full_attention_interval``-th."""
    interval = keys.count("full_attention_interval")
    usual = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    return recurrent_layers(keys, usual, recur=(_LINEAR,), attend=(_FULL,))


def gated_delta(keys: ConfigKeys, *, is_grouped: bool) -> GatedDelta:
    """Gated DeltaNet of the sizes that keys with ``linear_`` say."""
    require_silu(keys)
    key_heads, value_heads = (keys.count(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        keys.wrong(
            "linear_num_value_heads",
            f"linear_num_value_heads ({value_heads}) must be a multiple of linear_num_key_heads "
            f"({key_heads})",
        )
    return GatedDelta(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=keys.count("linear_key_head_dim"),
        value_head_dim=keys.count("linear_value_head_dim"),
        conv_width=keys.count("linear_conv_kernel_dim", least=2, most=MOST_SEEN),
        is_grouped=is_grouped,
    )


DELTA_NAMES = {
    "gated_q": "self_attn.q_proj.weight",
    "gated_q_bias": "self_attn.q_proj.bias",
    **{
        f"delta_{role}": f"linear_attn.in_proj_{role}.weight"
        for role in ("qkvz", "ba", "qkv", "z", "b", "a")
    },
    "recurrent_conv": "linear_attn.conv1d.weight",
    "recurrent_decay": "linear_attn.A_log",
    "recurrent_step": "linear_attn.dt_bias",
    "recurrent_norm": "linear_attn.norm.weight",
    "recurrent_out": "linear_attn.out_proj.weight",
}
"""Those of layers that recur by Gated DeltaNet, and of attention with gates beside queries."""
_DEFAULTS = {"partial_rotary_factor": 0.25, "full_attention_interval": 4}

QWEN3_NEXT = FamilySpec(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    defaults=_DEFAULTS,
    layers=_next,
    names=usual_names(DELTA_NAMES),
)
QWEN3_5_MOE_TEXT = FamilySpec(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults=_DEFAULTS,
    layers=_qwen3_5,
    names=usual_names(DELTA_NAMES).also_under({"model": "model.language_model"}),
)
QWEN3_5_MOE = QWEN3_5_MOE_TEXT.beside_others("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
