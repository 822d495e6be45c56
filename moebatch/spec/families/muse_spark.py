"""The text of Muse Spark (Meta): experts see normed latents, what each makes is normed, and what
parts of layers make is mixed with hidden states number by number."""

from collections.abc import Sequence
from dataclasses import replace

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    SLIDING,
    by_mlp_types,
    in_layers,
    layer_types,
    windows_of,
)
from moebatch.spec.families.parts import grouped_attention, mlps, sigmoid_router
from moebatch.spec.model.blocks import Mixing, Norm, OutNorms, Residual
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import IN_MODEL, usual_names

_THETAS = "layer_rope_theta"
_PERIOD = 4
_NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    usual = [FULL if _sees_all(layer, num_layers) else SLIDING for layer in range(num_layers)]
    types, scale = layer_types(keys, usual), keys.positive("output_multiplier")
    attention = grouped_attention(
        keys, biases="attention_bias", qk_norm="unscaled", norms_results=True, gate="apart"
    )
    queries = keys.positive("qk_scale_factor")
    attention = replace(attention, score_scale=queries * attention.scale)
    plain = replace(attention, num_rotated=0)
    residual = Residual(mixing=Mixing(temperature=keys.positive("residual_gate_temperature")))
    return Layers(
        attention=attention,
        layer_attentions=in_layers(num_layers, attention, plain, _unrotated(keys, num_layers)),
        sliding_windows=windows_of(keys, types),
        **mlps(keys, num_layers, by_mlp_types(keys, num_layers, range(num_layers))),
        latent_width=keys.count("moe_hidden_size"),
        norms_latents=True,
        router=sigmoid_router(
            logit_scale=scale,
            added_to_norm=1e-15,
            scale=keys.positive("routed_scaling_factor"),
            has_exact_logits=True,
        ),
        norm=Norm(counts_from_one=True, counts_last=False),
        norms=("input_norm", "attention_out_norm", *_NORMS),
        out_norms=OutNorms(eps=keys.positive("post_norm_eps"), unweighed=("attention_out_norm",)),
        norms_each_expert=True,
        norms_embedding=True,
        attention_residual=residual,
        mlp_residual=residual,
        logit_scale=scale,
        logit_cap=keys.positive("final_logit_softcapping"),
    )


def _sees_all(layer: int, num_layers: int) -> bool:
    """Every fourth layer does, counted from the last one, and has no rotary positions."""
    return (num_layers - 1 - layer) % _PERIOD == 0


def _unrotated(keys: ConfigKeys, num_layers: int) -> Sequence[int]:
    """Layers of which ``layer_rope_theta`` says 0; the others have the base of all."""
    usual, said = keys.rope().get("rope_theta"), keys.value(_THETAS)
    if said is None:
        said = [0 if _sees_all(layer, num_layers) else usual for layer in range(num_layers)]
    known = [0, usual]
    if not isinstance(said, list) or len(said) != num_layers or any(n not in known for n in said):
        expected = f"a list with 0 or rope_theta ({usual}) for each of {num_layers} layers"
        keys.fault(_THETAS, expected, said)
        return ()
    if not any(said):
        keys.wrong(_THETAS, "no layer has rotary positions; models without are not run")
    return [layer for layer, base in enumerate(said) if not base]


MUSE_SPARK = FamilySpec(
    architecture="MuseSparkForConditionalGeneration",
    model_type="muse_spark",
    config_type="muse_spark_text",
    within="text_config.",
    defaults={"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    layers=_layers,
    names=usual_names(
        {
            **{role: f"{name}.weight" for role, name in _NORMS.items()},
            "output_gate": "self_attn.gate_proj.weight",
            "latent_in": "mlp.pre_expert_proj.weight",
            "latent_norm": "mlp.pre_expert_norm.weight",
            "each_expert_norm": "mlp.experts.post_expert_norm.weight",
            "latent_out": "mlp.post_expert_proj.weight",
            "mixer_share": "post_attention_residual_gate.gate",
            "mlp_share": "post_feedforward_residual_gate.gate",
        },
    ).also_under(IN_MODEL),
    rotary_type="llama",
)
"""Images, videos and sounds are not read."""
