"""Jamba (AI21): most layers are Mamba-1 with norms, every eighth attends without positions, and
every second one has experts."""

from math import ceil

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.families.recurring import (
    conv_width,
    recurring_in,
    require_attention,
    require_silu,
)
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import SelectiveScan
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import OF_MAMBA, behind, projected_experts, usual_names

_MLP = "feed_forward"


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """All layers recur that do not attend."""
    attending = _by_turns(keys, "attn_layer", num_layers)
    has_experts = keys.count("num_experts") > 1
    moe_layers = _by_turns(keys, "expert_layer", num_layers) if has_experts else ()
    require_attention(keys, bool(attending))
    recurrent = tuple(layer for layer in range(num_layers) if layer not in attending)
    return Layers(
        attention=grouped_attention(keys, rotates=False),
        **recurring_in(keys, recurrent, _scan),
        **mlps(keys, num_layers, moe_layers, width="intermediate_size"),
        router=Router(),
    )


def _by_turns(keys: ConfigKeys, which: str, num_layers: int) -> tuple[int, ...]:
    """One of so many layers, from the offset on."""
    period = keys.count(f"{which}_period")
    offset = keys.count_or_zero(f"{which}_offset")
    if offset >= period:
        keys.wrong(
            f"{which}_offset",
            f"{which}_offset ({offset}) must be less than {which}_period ({period})",
        )
    return tuple(range(offset, num_layers, period))


def _scan(keys: ConfigKeys) -> SelectiveScan:
    require_silu(keys)
    hidden_size = keys.count("hidden_size")
    is_auto = keys.value("mamba_dt_rank") == "auto"
    return SelectiveScan(
        rank=ceil(hidden_size / 16) if is_auto else keys.count("mamba_dt_rank"),
        key_head_dim=keys.count("mamba_d_state"),
        value_head_dim=keys.count("mamba_expand") * hidden_size,
        conv_width=conv_width(keys, "mamba_d_conv"),
        conv_bias=keys.flag("mamba_conv_bias"),
        bias=keys.flag("mamba_proj_bias"),
    )


_OWN_ROLES = {
    "mlp_norm": "pre_ff_layernorm.weight",
    "router": f"{_MLP}.router.weight",
    **behind("mamba.", OF_MAMBA),
    "recurrent_step": "mamba.dt_proj.bias",
    "scan_step": "mamba.dt_proj.weight",
    "scan_select": "mamba.x_proj.weight",
    "scan_step_norm": "mamba.dt_layernorm.weight",
    "scan_key_norm": "mamba.b_layernorm.weight",
    "scan_query_norm": "mamba.c_layernorm.weight",
}
JAMBA = FamilySpec(
    architecture="JambaForCausalLM",
    model_type="jamba",
    layers=_layers,
    names=usual_names(
        _OWN_ROLES,
        mlp=(_MLP,),
        others={"final_norm": ("model.final_layernorm.weight",)},
        experts=projected_experts(_MLP),
        in_gguf={
            "scan_select": "ssm_x.weight",
            "scan_step": "ssm_dt.weight",
            "scan_step_norm": "ssm_dt_norm.weight",
            "scan_key_norm": "ssm_b_norm.weight",
            "scan_query_norm": "ssm_c_norm.weight",
        },
    ),
)
"""As released, and as transformers holds it in memory."""
