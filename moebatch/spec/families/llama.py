"""Llama 4 (Meta), its text alone: Scout and Maverick."""

from collections.abc import Sequence
from dataclasses import replace

from moebatch.spec.families.family import FamilySpec, grouped_attention, layer_types, usual_defaults
from moebatch.spec.model.attention import Temperature
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import LAYER, TensorNames, stacked_experts, usual_roles

_FULL, _CHUNKED = "full_attention", "chunked_attention"


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    rotating = _rotating_layers(keys, num_layers)
    in_chunks = () if keys.value("attention_chunk_size") is None else rotating
    usual = [_CHUNKED if layer in in_chunks else _FULL for layer in range(num_layers)]
    types = layer_types(keys, usual, known=(_FULL, _CHUNKED))
    chunk = keys.count("attention_chunk_size") if _CHUNKED in types else None
    attention = grouped_attention(
        keys,
        biases="attention_bias",
        qk_norm="unscaled" if keys.flag("use_qk_norm") else "none",
        norms_rotated=True,
        rotates_neighbours=True,
    )
    width = keys.count("intermediate_size")
    return Layers(
        attention=attention,
        global_attention=replace(
            attention, qk_norm="none", num_rotated=0, temperature=_temperature(keys)
        ),
        global_layers=tuple(layer for layer in range(num_layers) if layer not in rotating),
        sliding_windows=tuple(chunk if kind == _CHUNKED else None for kind in types),
        windows_are_chunks=True,
        moe_layers=_moe_layers(keys, num_layers),
        expert=Mlp(width=width),
        shared_expert=Mlp(width=width),
        dense=Mlp(width=keys.count("intermediate_size_mlp")),
        router=Router(scores="sigmoid", weighs_inputs=True),
    )


def _rotating_layers(keys: ConfigKeys, num_layers: int) -> Sequence[int]:
    """Those of which ``no_rope_layers`` says 1, or all but every n-th."""
    interval = keys.count("no_rope_layer_interval")
    given = keys.value("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(num_layers)
    ]
    is_list = isinstance(given, list) and len(given) >= num_layers
    if not is_list or any(flag not in (0, 1) for flag in given):
        keys.fault("no_rope_layers", f"{num_layers} zeros and ones", given)
        return range(num_layers)
    found = [layer for layer in range(num_layers) if given[layer]]
    if not found:
        keys.wrong("no_rope_layers", "no layer has rotary positions; models without are not run")
    return found


def _temperature(keys: ConfigKeys) -> Temperature | None:
    """The first released files say how many layers apart those are in which it is tuned."""
    step, strength = keys.count("floor_scale"), keys.positive("attn_scale")
    return Temperature(step, strength) if keys.value("attn_temperature_tuning") else None


def _moe_layers(keys: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """As ``moe_layers`` lists them, or every n-th."""
    step = keys.count("interleave_moe_layer_step")
    given = keys.value("moe_layers")
    if given is None:
        given = [*range(step - 1, num_layers, step)]
    known = range(num_layers)
    if isinstance(given, list) and given and all(type(n) is int and n in known for n in given):
        return tuple(sorted({*given}))
    keys.fault("moe_layers", f"a list of layers below {num_layers}", given)
    return tuple(known)


_BLOCK = LAYER + "feed_forward."
LLAMA4_TEXT = FamilySpec(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    defaults=usual_defaults(
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        num_experts_per_tok=1,
        num_experts=16,
        moe_layers=None,
        interleave_moe_layer_step=1,
        use_qk_norm=True,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        attention_chunk_size=8192,
        layer_types=None,
        attn_temperature_tuning=True,
        floor_scale=8192,
        attn_scale=0.1,
    ),
    spelling={"num_experts": "num_local_experts"},
    layers=_layers,
    names=TensorNames(
        roles=usual_roles()
        | {
            "router": (_BLOCK + "router.weight",),
            **{
                f"{prefix}_{role}": (f"{_BLOCK}{within}{role}_proj.weight",)
                for prefix, within in (("mlp", ""), ("shared", "shared_expert."))
                for role in ("gate", "up", "down")
            },
        },
        # [E, D, 2F] and [E, F, D].
        experts=(stacked_experts("feed_forward.experts.").across("gate", "up", "down"),),
    ).also_under({"model": "language_model.model", "lm_head": "language_model.lm_head"}),
)
_BESIDE_OTHERS = LLAMA4_TEXT.beside_others("Llama4ForConditionalGeneration", "llama4")
LLAMA4 = replace(
    _BESIDE_OTHERS,
    spelling=dict(_BESIDE_OTHERS.spelling)
    | {"tie_word_embeddings": "text_config.tie_word_embeddings"},
)
"""Its head is a part of the text model, not of what has others beside it."""
