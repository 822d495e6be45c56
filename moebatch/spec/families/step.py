"""Step-3.5-Flash, and the text of Step-3.7-Flash (StepFun)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    SLIDING,
    Windows,
    by_mlp_types,
    in_two_ways,
    layer_types,
    windows_of,
)
from moebatch.spec.families.parts import clamps_by_layer, grouped_attention, mlps, sigmoid_router
from moebatch.spec.families.recurring import require_silu
from moebatch.spec.model.blocks import Norm
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import (
    IN_MODEL,
    LAYER,
    STACKED_EXPERTS,
    ExpertLayout,
    usual_names,
)

_HEADS = "num_attention_heads"
_USUAL_BASE = 10000.0
_BY_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
_COMPUTED: Mapping[str, Sequence[object]] = {
    "att_impl_type": ("GQA",),
    "gating": (True, "per-head"),
    "moe_router_activation": ("sigmoid",),
    "norm_expert_weight": (True,),
    "sink": (False,),
    "use_bidirectional_attention": (False,),
    "use_head_wise_attn_gate": (True,),
    "use_mfa": (False,),
    "use_moe": (True,),
    "use_moe_router_bias": (True,),
    "use_qk_norm": (True,),
    "use_rope_layers": ([],),
    "yarn_only_types": ([FULL],),
    "zero_centered": (True,),
}
"""What is computed of keys that files may have and transformers passes over."""


def _reworded(keys: ConfigKeys) -> dict[str, Any]:
    """Lists of released files go on for layers that foretell tokens, which are not computed, and
    rotary parameters are among them."""
    num_layers = keys.count("num_hidden_layers")
    padded = num_layers + keys.count_or_zero("num_nextn_predict_layers")
    said = {key: keys.value(key) for key in _BY_LAYER}
    lists = {
        key: value[:num_layers] if isinstance(value, list) and len(value) == padded else value
        for key, value in said.items()
    }
    rotary = keys.value("rope_parameters")
    if rotary is None:
        types = lists["layer_types"]
        types = types if isinstance(types, list) else [FULL] * num_layers
        rotary = {kind: _rotary(keys, types, kind) for kind in (FULL, SLIDING)}
    return lists | {"rope_parameters": rotary, "rope_scaling": None, "rope_theta": None}


def _rotary(keys: ConfigKeys, types: Sequence[object], kind: str) -> dict[str, Any]:
    """Rotary parameters of layers of a kind; those that see everything may be scaled."""

    def of_kind(key: str) -> Any:
        said = keys.value(key)
        if not isinstance(said, list):
            return said
        found = [value for of_layer, value in zip(types, said, strict=False) if of_layer == kind]
        if len(said) < len(types) or any(value != found[0] for value in found):
            keys.fault(key, f"a number for each layer, the same for all of {kind}", said)
        return found[0] if found else None

    base, share = of_kind("rope_theta"), of_kind("partial_rotary_factors")
    found = {"rope_type": "default", "rope_theta": _USUAL_BASE if base is None else base}
    if share is not None:
        found["partial_rotary_factor"] = share
    scaling = keys.value("rope_scaling")
    return found | scaling if kind == FULL and isinstance(scaling, dict) else found


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    require_silu(keys)
    windows = windows_of(keys, layer_types(keys, (FULL,) * num_layers))
    full = _attention(keys, FULL)
    sparse = by_mlp_types(keys, num_layers, _numbered(keys, num_layers))
    return Layers(
        **in_two_ways(windows, _sliding_attention(keys, full, windows), full),
        **mlps(keys, num_layers, sparse, shared="share_expert_dim", biases="mlp_bias"),
        expert_clamps=clamps_by_layer(keys, "swiglu_limits", num_layers),
        mlp_clamps=clamps_by_layer(keys, "swiglu_limits_shared", num_layers),
        router=sigmoid_router(
            scale=keys.positive("moe_router_scaling_factor"),
            has_exact_logits=keys.flag("need_fp32_gate"),
        ),
        norm=Norm(counts_from_one=True),
    )


def _attention(keys: ConfigKeys, kind: str) -> GroupedAttention:
    scalar = keys.positive_or_none("query_pre_attn_scalar")
    return grouped_attention(
        keys,
        biases="attention_bias",
        rotates_part=True,
        qk_norm="head",
        gate="of heads",
        rotary=kind,
        score_scale=None if scalar is None else scalar**-0.5,
    )


def _sliding_attention(
    keys: ConfigKeys, full: GroupedAttention, windows: Windows
) -> GroupedAttention:
    """That of layers that slide, which may have another number of heads."""
    key = "num_sliding_attention_heads"
    heads = keys.count_or_none(key) or full.num_heads
    keys.require_multiple(key, heads, "num_key_value_heads", full.num_kv_heads)
    by_layer = {str(n): {_HEADS: heads} for n, window in enumerate(windows) if window is not None}
    changed = by_layer if heads != full.num_heads else {}
    said = keys.value("per_layer_config")
    if said is not None and said not in (by_layer, changed):
        keys.fault("per_layer_config", f"{heads} heads in all layers that slide", said)
    others, size = keys.value("attention_other_setting"), full.head_dim
    sizes = {"num_attention_groups": full.num_kv_heads, "head_dim": size, "true_head_dim": size}
    alike = {"attention_type": SLIDING, _HEADS: heads, **sizes}
    if others is not None and not (isinstance(others, dict) and others.items() <= alike.items()):
        what = f"{heads} heads of {size} numbers, those of keys as elsewhere, in layers that slide"
        keys.fault("attention_other_setting", what, others)
    rotated = keys.rotary_dim(full.head_dim, SLIDING)
    return replace(full, num_heads=heads, rotary=SLIDING, num_rotated=rotated)


def _numbered(keys: ConfigKeys, num_layers: int) -> frozenset[int] | range:
    """Layers whose numbers are in ``moe_layers_enum``, between commas or in a list; all but three
    where there is no such key."""
    said = keys.value("moe_layers_enum")
    if said is None:
        return range(3, num_layers)
    numbers = said.split(",") if isinstance(said, str) else said
    try:
        return frozenset(int(number) for number in numbers if str(number).strip())
    except (TypeError, ValueError):
        keys.fault("moe_layers_enum", "numbers of layers between commas", said)
        return range(num_layers)


_HUB_EXPERTS = ExpertLayout(
    weights={f"{LAYER}moe.{role}_proj.weight": (role,) for role in ("gate", "up", "down")},
    is_stacked=True,
)

STEP3P5 = FamilySpec(
    architecture="Step3p5ForCausalLM",
    model_type="step3p5",
    defaults={"need_fp32_gate": False},
    synonyms={"num_sliding_attention_heads": ("attention_other_setting.num_attention_heads",)},
    reworded=_reworded,
    computed=_COMPUTED,
    layers=_layers,
    rotary_type="mixtral",
    names=usual_names(
        {
            "output_gate": "self_attn.g_proj.weight",
            "router": ("moe.gate.weight", "mlp.gate.weight"),
            "router_correction": ("moe.router_bias", "mlp.gate.e_score_correction_bias"),
        },
        shared=("share_expert", "mlp.shared_experts"),
        in_gguf={"output_gate": "attn_gate.weight"},
        experts=(_HUB_EXPERTS, STACKED_EXPERTS),
    ),
)
"""Released files hold layers more, which foretell tokens and are not computed."""
STEP3P7 = STEP3P5.beside_others(
    "Step3p7ForConditionalGeneration", "step3p7", names=STEP3P5.names.also_under(IN_MODEL)
)
"""Images are not read: its vision tensors are left alone."""
