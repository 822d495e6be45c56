"""Beam (Reflection AI): layers that slide rotate, in the others queries grow with their positions;
what parts of layers have made counts as much as embeddings."""

from collections.abc import Mapping

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    SLIDING,
    by_mlp_types,
    in_two_ways,
    layer_types,
    windows_of,
)
from moebatch.spec.families.parts import corrected_router, grouped_attention, mlps
from moebatch.spec.model.attention import PowerTemperature
from moebatch.spec.model.blocks import Norm
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_INTERVAL, _NUM_DENSE = 6, 3
_TEMPERATURE = PowerTemperature(step=2048, exponent=0.1)
_OWN_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    usual = [SLIDING if (layer + 1) % _INTERVAL else FULL for layer in range(num_layers)]
    types = layer_types(keys, [*usual[:-1], FULL])
    rotary = _rotary(keys)
    return Layers(
        **in_two_ways(
            windows_of(keys, types),
            *(_attention(keys, kind, rotates=rotary[kind] is not None) for kind in (SLIDING, FULL)),
        ),
        **mlps(keys, num_layers, by_mlp_types(keys, num_layers, range(_NUM_DENSE, num_layers))),
        router=corrected_router(keys),
        norm=Norm(rounds_once=True),
        norms=("input_norm", *_OWN_NORMS),
        divides_by_depth=True,
        logit_cap=keys.positive_or_none("final_logit_softcapping"),
    )


def _rotary(keys: ConfigKeys) -> Mapping[str, object]:
    """Parameters of both kinds of layers; null of one without positions."""
    said = keys.value("rope_parameters")
    if isinstance(said, Mapping) and {SLIDING, FULL} <= said.keys():
        return said
    keys.fault("rope_parameters", f"an object with {SLIDING} and {FULL}", said)
    return dict.fromkeys((SLIDING, FULL))


def _attention(keys: ConfigKeys, kind: str, *, rotates: bool) -> GroupedAttention:
    return grouped_attention(
        keys,
        biases="attention_bias",
        rotates=rotates,
        rotary=kind if rotates else None,
        temperature=None if rotates else _TEMPERATURE,
        qk_norm="head",
        gate="apart",
        has_gate_biases=True,
    )


BEAM = FamilySpec(
    architecture="BeamForCausalLM",
    model_type="beam",
    layers=_layers,
    rotary_type="qwen3_moe",
    names=usual_names(
        {
            **{role: f"{name}.weight" for role, name in _OWN_NORMS.items()},
            "output_gate": "self_attn.gate_proj.weight",
            "head_gate_bias": "self_attn.gate_bias",
        }
    ),
)
