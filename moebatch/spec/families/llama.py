"""Llama 4 (Meta), its text alone: Scout and Maverick."""

from collections.abc import Sequence
from dataclasses import replace

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import FULL, in_layers, layer_types, windows_of
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.attention import Temperature
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import AROUND_MODEL, stacked_experts, usual_names

_CHUNKED = "chunked_attention"


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    rotating = _rotating_layers(keys, num_layers)
    in_chunks = () if keys.value("attention_chunk_size") is None else rotating
    usual = [_CHUNKED if layer in in_chunks else FULL for layer in range(num_layers)]
    types = layer_types(keys, usual, known=(FULL, _CHUNKED))
    attention = grouped_attention(
        keys,
        biases="attention_bias",
        qk_norm="unscaled" if keys.flag("use_qk_norm") else "none",
        norms_rotated=True,
        rotates_neighbours=True,
    )
    plain = replace(attention, qk_norm="none", num_rotated=0, temperature=_temperature(keys))
    return Layers(
        attention=attention,
        layer_attentions=in_layers(num_layers, plain, attention, rotating),
        sliding_windows=windows_of(keys, types, _CHUNKED, "attention_chunk_size"),
        windows_are_chunks=True,
        **mlps(
            keys,
            num_layers,
            _moe_layers(keys, num_layers),
            width="intermediate_size",
            dense="intermediate_size_mlp",
            shared="intermediate_size",
        ),
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


_BLOCK = "feed_forward"
LLAMA4_TEXT = FamilySpec(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    layers=_layers,
    names=usual_names(
        {"router": f"{_BLOCK}.router.weight"},
        mlp=(_BLOCK,),
        shared=(f"{_BLOCK}.shared_expert",),
        # [E, D, 2F] and [E, F, D].
        experts=(stacked_experts(f"{_BLOCK}.experts.").across("gate", "up", "down"),),
    ).also_under(AROUND_MODEL),
)
LLAMA4 = LLAMA4_TEXT.beside_others(
    "Llama4ForConditionalGeneration", "llama4", beside=("model_type", "torch_dtype")
)
"""Its head is a part of the text model, not of what has others beside it."""
