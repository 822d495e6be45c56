"""Llama 4 (Meta), its text alone: Scout and Maverick."""

from collections.abc import Sequence
from dataclasses import replace

from moebatch.spec.families.family import FamilySpec, grouped_attention, in_layers, layer_types
from moebatch.spec.model.attention import Temperature
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import stacked_experts, usual_names

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
    plain = replace(attention, qk_norm="none", num_rotated=0, temperature=_temperature(keys))
    return Layers(
        attention=attention,
        layer_attentions=in_layers(num_layers, plain, attention, rotating),
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


_BLOCK = "feed_forward."
LLAMA4_TEXT = FamilySpec(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    layers=_layers,
    names=usual_names(
        {
            "router": _BLOCK + "router.weight",
            **{
                f"{prefix}_{role}": f"{_BLOCK}{within}{role}_proj.weight"
                for prefix, within in (("mlp", ""), ("shared", "shared_expert."))
                for role in ("gate", "up", "down")
            },
        },
        # [E, D, 2F] and [E, F, D].
        experts=(stacked_experts("feed_forward.experts.").across("gate", "up", "down"),),
    ).also_under({"model": "language_model.model", "lm_head": "language_model.lm_head"}),
)
LLAMA4 = replace(
    LLAMA4_TEXT.beside_others("Llama4ForConditionalGeneration", "llama4"),
    beside=("model_type", "torch_dtype"),
)
"""Its head is a part of the text model, not of what has others beside it."""
