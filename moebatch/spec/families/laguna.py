"""Laguna (Poolside): layers that slide may have more heads; gates of attention open by softplus."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    SLIDING,
    by_mlp_types,
    in_two_ways,
    layer_types,
    windows_of,
)
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.attention import GateOpening, OutputGate
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_OPENING: GateOpening = "softplus"


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    types = layer_types(keys, (FULL,) * num_layers)
    ways = (_attention(keys, types, kind) for kind in (SLIDING, FULL))
    sparse = by_mlp_types(keys, num_layers, range(1, num_layers))
    return Layers(
        **in_two_ways(windows_of(keys, types), *ways),
        **mlps(keys, num_layers, sparse, shared="shared_expert_intermediate_size"),
        router=Router(
            scores="sigmoid",
            logit_cap=_cap(keys),
            has_correction=True,
            norm_order=1.0,
            scale=keys.positive("moe_routed_scaling_factor"),
        ),
    )


def _attention(keys: ConfigKeys, types: Sequence[str], kind: str) -> GroupedAttention:
    """That of layers of a kind."""
    found = grouped_attention(
        keys,
        biases="attention_bias",
        rotates_part=True,
        qk_norm="head",
        gate=_gate(keys),
        gate_opening=_OPENING,
        rotary=kind,
    )
    return replace(found, num_heads=_num_heads(keys, found, types, kind))


def _num_heads(keys: ConfigKeys, usual: GroupedAttention, types: Sequence[str], kind: str) -> int:
    """``num_attention_heads_per_layer`` of layers of a kind, which have to have as many."""
    key = "num_attention_heads_per_layer"
    said = keys.value(key)
    if said is None:
        return usual.num_heads
    if not isinstance(said, list) or len(said) != len(types):
        keys.fault(key, f"a list with a number for each of {len(types)} layers", said)
        return usual.num_heads
    found: list[Any] = [
        count for of_layer, count in zip(types, said, strict=True) if of_layer == kind
    ]
    if not found:
        return usual.num_heads
    count = keys.whole_number(key, found[0])
    if any(other != count for other in found):
        keys.fault(key, f"the same number for all of {kind}", said)
    elif count % usual.num_kv_heads:
        kv_text = keys.worded("num_key_value_heads", usual.num_kv_heads)
        keys.wrong(key, f"{key} ({count}) must be multiples of {kv_text}")
    return count


def _gate(keys: ConfigKeys) -> OutputGate:
    """``gating``: a gate for each head, or for each of its numbers."""
    said = keys.value("gating")
    if said is True or said == "per-head":
        return "of heads"
    if said != "per-element":
        keys.fault("gating", "true, per-head or per-element", said)
    return "apart"


def _cap(keys: ConfigKeys) -> float | None:
    key = "moe_router_logit_softcapping"
    return None if keys.value(key) in (None, 0) else keys.positive(key)


LAGUNA = FamilySpec(
    architecture="LagunaForCausalLM",
    model_type="laguna",
    computed={"moe_apply_router_weight_on_input": (False,)},
    layers=_layers,
    rotary_type="mixtral",
    names=usual_names(
        {
            "output_gate": "self_attn.g_proj.weight",
            "router_correction": (
                "mlp.experts.e_score_correction_bias",
                "mlp.gate.e_score_correction_bias",
            ),
        },
        shared=("mlp.shared_expert", "mlp.shared_experts"),
    ),
)
