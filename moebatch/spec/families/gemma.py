"""Gemma 4 with experts (Google), its text alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, SLIDING, by_layer_types, in_layers
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.blocks import Norm, Router
from moebatch.spec.model.config_keys import MAX_COUNT, ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import IN_MODEL, stacked_experts, usual_names

_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm_2",
    "shared_norm": "pre_feedforward_layernorm",
    "experts_out_norm": "post_feedforward_layernorm_2",
    "shared_out_norm": "post_feedforward_layernorm_1",
    "mlp_out_norm": "post_feedforward_layernorm",
}

_IN_GGUF = {
    "attention_out_norm": "post_attention_norm.weight",
    "mlp_norm": "pre_ffw_norm_2.weight",
    "shared_norm": "ffn_norm.weight",
    "experts_out_norm": "post_ffw_norm_2.weight",
    "shared_out_norm": "post_ffw_norm_1.weight",
    "mlp_out_norm": "post_ffw_norm.weight",
    **{f"shared_{role}": f"ffn_{role}.weight" for role in ("gate", "up", "down")},
    "router_norm": "ffn_gate_inp.scale",
    "router_expert_weights": "ffn_down_exps.scale",
    "layer_scale": "layer_output_scale.weight",
}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """What files call the MLP of a layer is a shared expert with norms of its own."""
    _refuse(keys)
    *windows, _ = by_layer_types(keys, num_layers, lambda layer: bool((layer + 1) % 6))
    sliding = grouped_attention(
        keys,
        biases="attention_bias",
        qk_norm="head",
        score_scale=1.0,
        norms_values=True,
        rotary=SLIDING,
    )
    seeing_all = [*(n for n, window in enumerate(windows) if window is None), num_layers - 1]
    seeing = _global_attention(keys, sliding, seeing_all)
    return Layers(
        attention=sliding,
        layer_attentions=in_layers(num_layers, sliding, seeing, seeing_all),
        sliding_windows=(*windows, None),  # the last layer sees everything, whatever files say
        **mlps(keys, num_layers, shared="intermediate_size"),
        router=Router(
            norm_order=1.0, has_own_norm=True, weighs_experts=True, has_exact_weights=True
        ),
        norm=Norm(rounds_once=True),
        norms=("input_norm", *_NORMS),
        scales_layers=True,
        embedding_scale=keys.count("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logit_cap=keys.positive_or_none("final_logit_softcapping"),
    )


def _refuse(keys: ConfigKeys) -> None:
    """What smaller models of the family do, which have no experts."""
    if not keys.flag("enable_moe_block"):
        keys.wrong("enable_moe_block", "enable_moe_block is false: models without experts")
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if keys.count_or_zero(key):
            keys.wrong(key, f"{key} ({keys.value(key)}) must be 0: others are not computed")
    if keys.value("use_bidirectional_attention") == "all":
        keys.wrong(
            "use_bidirectional_attention", "use_bidirectional_attention (all) is not computed"
        )


def _global_attention(
    keys: ConfigKeys, sliding: GroupedAttention, layers: Sequence[int]
) -> GroupedAttention:
    """Keys are values where ``attention_k_eq_v`` says so, and only then have heads of their own
    number."""
    values_are_keys = keys.flag("attention_k_eq_v")
    key, as_written = "num_global_key_value_heads", _as_written(keys, sliding, layers)
    given = keys.count_or_none(key) if values_are_keys else None
    kv_heads = as_written.get("num_key_value_heads", given or sliding.num_kv_heads)
    head_dim = as_written.get("head_dim", keys.count("global_head_dim"))
    if sliding.num_heads % kv_heads:
        keys.wrong(
            key,
            f"num_attention_heads ({sliding.num_heads}) must be a multiple of the {kv_heads} heads "
            "of keys in layers of full attention",
        )
    if head_dim % 2:
        keys.wrong("global_head_dim", f"global_head_dim ({head_dim}) must be even")
    return replace(
        sliding,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        values_are_keys=values_are_keys,
        rotary=FULL,
    )


def _as_written(
    keys: ConfigKeys, sliding: GroupedAttention, layers: Sequence[int]
) -> Mapping[str, int]:
    """Sizes of layers of full attention as transformers 5 writes them: once for each layer, those
    that are the same in all layers left out."""
    written = keys.value("per_layer_config")
    everywhere = {"head_dim": sliding.head_dim, "num_key_value_heads": sliding.num_kv_heads}
    if written == {}:
        return everywhere
    if not written:
        return {}
    numbers = {str(layer) for layer in layers}
    entries: list[Any] = [*written.values()] if isinstance(written, Mapping) else [None]
    first = entries[0]
    is_usual = (
        isinstance(first, Mapping)
        and {str(number).lstrip("0") or "0" for number in written} == numbers
        and all(entry == first for entry in entries)
        and first.keys() <= {"head_dim", "num_key_value_heads"}
        and all(type(size) is int and 0 < size <= MAX_COUNT for size in first.values())
    )
    if is_usual:
        return {**everywhere, **first}
    expected = "head_dim and num_key_value_heads, the same in all layers of full attention and only"
    keys.fault("per_layer_config", f"{expected} there", written)
    return {}


GEMMA4_TEXT = FamilySpec(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    defaults={"global_head_dim": 512},
    spelling={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    layers=_layers,
    names=usual_names(
        {
            **{role: f"{name}.weight" for role, name in _NORMS.items()},
            "router": "router.proj.weight",
            "router_norm": "router.scale",
            "router_expert_weights": "router.per_expert_scale",
            "layer_scale": "layer_scalar",
        },
        shared=("mlp",),
        experts=(stacked_experts("experts."),),
        in_gguf=_IN_GGUF,
    ).also_under(IN_MODEL),
    rotary_type="mixtral",
)
GEMMA4 = GEMMA4_TEXT.beside_others("Gemma4ForConditionalGeneration", "gemma4")
