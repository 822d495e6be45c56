"""Granite-3 MoE and PowerMoE (IBM), without a shared expert and with one; Granite-SWASH, most of
whose layers slide; and Granite-4, most of whose layers are Mamba-2."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, LINEAR, SLIDING, Windows, by_layer_types, in_two_ways
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.families.recurring import recurring, require_silu, state_space
from moebatch.spec.model.blocks import Residual, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.recurrence import StateSpace
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import OF_MAMBA, behind, stacked_experts, usual_names

_BLOCK = "block_sparse_moe."


def _layers(keys: ConfigKeys, num_layers: int, *, rotates: bool = True) -> Layers:
    shared = "shared_intermediate_size"
    residual = Residual(added=keys.positive("residual_multiplier"))
    return Layers(
        attention=grouped_attention(
            keys,
            biases="attention_bias",
            rotates=rotates,
            score_scale=keys.positive("attention_multiplier"),
        ),
        **mlps(
            keys,
            num_layers,
            width="intermediate_size",
            shared=shared if keys.count_or_zero(shared) else None,
        ),
        router=Router(norm_order=1.0),
        embedding_scale=keys.positive("embedding_multiplier"),
        attention_residual=residual,
        recurrent_residual=residual,
        mlp_residual=residual,
        logit_scale=1 / keys.positive("logits_scaling"),
    )


def _sliding(keys: ConfigKeys, num_layers: int) -> Layers:
    layers, rotary = _layers(keys, num_layers), keys.value("rope_parameters")
    usual = layers.attention
    assert isinstance(usual, GroupedAttention), "that of the family"
    sliding, full = (
        replace(
            usual,
            has_sink_scores=True,
            rotary=kind,
            num_rotated=None if rotary.get(kind, {}).get("rope_theta") else 0,
        )
        for kind in (SLIDING, FULL)
    )
    return replace(layers, **in_two_ways(_windows(keys, num_layers), sliding, full))


def _windows(keys: ConfigKeys, num_layers: int) -> Windows:
    return by_layer_types(keys, num_layers, lambda layer: layer % 4 != 0)


def _by_kind(keys: ConfigKeys) -> dict[str, Any]:
    """Rotary parameters of layers that slide, and of those that see everything: all are scaled
    alike, and have a base for each layer, which is 0 where nothing rotates."""
    num_layers, said = keys.count("num_hidden_layers"), dict(keys.rope())
    bases, rotary = _bases(keys, num_layers, said), dict[str, Any]()
    said.setdefault("rope_type", said.pop("type", "default"))
    for base, window in zip(bases, _windows(keys, num_layers), strict=True):
        kind = FULL if window is None else SLIDING
        if rotary.setdefault(kind, said | {"rope_theta": base})["rope_theta"] != base:
            keys.fault("layer_rope_theta", f"the same number for all layers of {kind}", bases)
    return {"rope_parameters": rotary, "rope_scaling": None, "rope_theta": None}


def _bases(keys: ConfigKeys, num_layers: int, rotary: dict[str, Any]) -> Sequence[float]:
    usual = [rotary.get("rope_theta", keys.value("rope_theta"))] * num_layers
    said = keys.value("layer_rope_theta")
    if said is None:
        return usual
    if (
        isinstance(said, list)
        and len(said) == num_layers
        and all(isinstance(base, int | float) and 0 <= base < inf for base in said)
    ):
        return said
    expected = f"a list with a number of at least 0 for each of {num_layers} layers"
    keys.fault("layer_rope_theta", expected, said)
    return usual


def _hybrid(keys: ConfigKeys, num_layers: int) -> Layers:
    layers = _layers(keys, num_layers, rotates=keys.value("position_embedding_type") == "rope")
    usual = ("mamba",) * num_layers
    return replace(layers, **recurring(keys, usual, _state_space, recur=_RECUR, attend=_ATTEND))


def _state_space(keys: ConfigKeys) -> StateSpace:
    require_silu(keys)
    heads = keys.count("mamba_n_heads")
    width = keys.count("mamba_expand") * keys.count("hidden_size")
    head_dim = width // heads
    if keys.value("mamba_d_head") != "auto":
        head_dim = keys.count("mamba_d_head")
    if heads * head_dim != width:
        keys.wrong(
            "mamba_d_head",
            f"mamba_n_heads ({heads}) x mamba_d_head ({head_dim}) must be mamba_expand x "
            f"hidden_size ({width})",
        )
    return state_space(keys, heads, head_dim)


_RECUR, _ATTEND = ("mamba", LINEAR), ("attention", FULL)
_NAMES = usual_names(
    {
        "router": (_BLOCK + "router.layer.weight", _BLOCK + "router.weight"),
        "shared_gate_up": "shared_mlp.input_linear.weight",
        "shared_down": "shared_mlp.output_linear.weight",
        **behind("mamba.", OF_MAMBA),
    },
    joined={"shared_gate_up": ("shared_gate", "shared_up")},
    experts=(
        stacked_experts(_BLOCK, gate_up="input_linear.weight", down="output_linear.weight"),
        stacked_experts(_BLOCK + "experts."),
    ),
)
"""As released, and as transformers holds them in memory."""
GRANITE_MOE = FamilySpec(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    layers=_layers,
    names=_NAMES,
)
GRANITE_MOE_SHARED = FamilySpec(
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    layers=_layers,
    names=_NAMES,
)
GRANITE_MOE_SWA = FamilySpec(
    architecture="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    defaults={"rope_theta": 1e4},
    reworded=_by_kind,
    rotary_type="granitemoe",
    layers=_sliding,
    names=_NAMES,
)
GRANITE_MOE_HYBRID = FamilySpec(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    rotary_type="granitemoe",
    layers=_hybrid,
    names=_NAMES,
)
