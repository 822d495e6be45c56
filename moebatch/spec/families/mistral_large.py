"""The text of Mistral Large 4 (Mistral AI): latent attention with DeepSeek's indexers, queries that
grow by what heads have learnt, and layers without positions."""

from dataclasses import replace

from moebatch.spec.families.deepseek import (
    DEEPSEEK_V3,
    choosing,
    indexer_types,
    latent_attention,
    latent_layers,
)
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import in_layers
from moebatch.spec.families.parts import expert_groups
from moebatch.spec.model.attention import LearntTemperature
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import (
    IN_MODEL,
    ExpertLayout,
    TensorNames,
    separate_experts,
)


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    _require_own_latents(keys, num_layers)
    latent = replace(
        latent_attention(keys, rotates_neighbours=True),
        query_rank=None,
        norm_eps=keys.positive("rms_norm_eps"),
        temperature=LearntTemperature(),
    )
    plain = replace(latent, rope_head_dim=0)
    layers = replace(
        latent_layers(keys, num_layers, latent, _router(keys)),
        layer_attentions=in_layers(num_layers, latent, plain, _without_positions(keys, num_layers)),
        num_learnt_frequencies=latent.rope_head_dim // 2,
        logit_cap=keys.positive("final_logit_softcapping"),
    )
    return choosing(
        layers,
        keys,
        indexer_types(keys, num_layers),
        rotates_neighbours=True,
        seen_width=keys.count("hidden_size"),
        temperature=LearntTemperature(),
    )


def _router(keys: ConfigKeys) -> Router:
    return Router(
        groups=expert_groups(keys, num_scored=2),
        norm_order=1.0,
        least_norm=1e-20,
        scale=keys.positive("routed_scaling_factor"),
        has_exact_logits=True,
        has_exact_weights=True,
    )


def _require_own_latents(keys: ConfigKeys, num_layers: int) -> None:
    """Notes a fault where layers attend to what others have cached."""
    sources = keys.value("kv_source_layers")
    if sources is not None and sources != [*range(num_layers)]:
        expected = "each layer's own number, since layers that share latents are not computed"
        keys.fault("kv_source_layers", expected, sources)


def _without_positions(keys: ConfigKeys, num_layers: int) -> list[int]:
    """Those of which ``no_rope_layers`` says 0, or every so many."""
    rotates = keys.value("no_rope_layers")
    if rotates is None:
        step = keys.count("no_rope_layer_interval")
        rotates = [(layer + 1) % step for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) < num_layers:
        keys.fault(
            "no_rope_layers", f"a list with a number for each of {num_layers} layers", rotates
        )
        return []
    if not any(rotates[:num_layers]):
        keys.wrong("no_rope_layers", "no layer has rotary positions; models without are not run")
    return [layer for layer in range(num_layers) if not rotates[layer]]


_ATTENTION = {
    "q": "wq.weight",
    "o": "wo.weight",
    "o_bias": "wo.bias",
    "kv_a": "wkv_a_with_mqa.weight",
    "kv_a_bias": "wkv_a_with_mqa.bias",
    "kv_a_norm": "kv_a_norm.weight",
    "kv_b": "wkv_b.weight",
    "query_scale": "ssmax_scaling.s",
    "query_scale_bias": "ssmax_scaling.b",
    "index_scale": "indexer.ssmax_scaling.s",
    "index_scale_bias": "indexer.ssmax_scaling.b",
    "index_seen_norm": "indexer.q_input_norm.weight",
    "index_seen_norm_bias": "indexer.q_input_norm.bias",
    "index_q": "indexer.wq_b.weight",
    "index_k": "indexer.wk.weight",
    "index_k_norm": "indexer.k_norm.weight",
    "index_k_norm_bias": "indexer.k_norm.bias",
    "index_weights": "indexer.weights_proj.weight",
}
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
_RELEASED = {
    "embedding": "tok_embeddings.weight",
    "final_norm": "norm.weight",
    "head": "output.weight",
    "rotary_growth": "lerope.alpha",
    **{role: f"layers.{{layer}}.attention.{name}" for role, name in _ATTENTION.items()},
    "input_norm": "layers.{layer}.attention_norm.weight",
    "mlp_norm": "layers.{layer}.ffn_norm.weight",
    "router": "layers.{layer}.gate.weight",
    **{
        f"{role}_{matrix}": f"layers.{{layer}}.{part}.{name}.weight"
        for role, part in (("mlp", "feed_forward"), ("shared", "shared_experts"))
        for matrix, name in _MATRICES.items()
    },
}
"""Names of released files."""
_HELD = {
    role: f"self_attn.{part}softmax_scaling.{name}"
    for role, part, name in (
        ("query_scale", "", "scale"),
        ("query_scale_bias", "", "bias"),
        ("index_scale", "indexer.", "scale"),
        ("index_scale_bias", "indexer.", "bias"),
    )
}
"""What transformers holds in memory, as far as other families have no names for it."""


def _released_experts() -> ExpertLayout:
    layout = separate_experts("experts.{expert}", **_MATRICES)
    named = {name.removeprefix("model."): roles for name, roles in layout.weights.items()}
    return replace(layout, weights=named)


def _names() -> TensorNames:
    held = DEEPSEEK_V3.names.with_names(
        {
            **_HELD,
            **{role: f"self_attn.{_ATTENTION[role]}" for role in _ATTENTION if "seen" in role},
        }
    )
    held = replace(held, roles={**held.roles, "rotary_growth": ("model.rotary_emb.alpha",)})
    held = held.also_under(IN_MODEL)
    return replace(
        held,
        roles={
            role: (_RELEASED[role], *names) if role in _RELEASED else names
            for role, names in held.roles.items()
        },
        experts=(_released_experts(), *held.experts),
    )


MISTRAL_LARGE4 = FamilySpec(
    architecture="MistralLarge4ForConditionalGeneration",
    model_type="mistral_large4",
    config_type="mistral_large4_text",
    within="text_config.",
    defaults={
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
        "no_rope_layer_interval": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2048.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
        },
    },
    layers=_layers,
    names=_names(),
    rotary_type=DEEPSEEK_V3.model_type,
)
"""Images are not read, and neither is what foretells tokens."""
