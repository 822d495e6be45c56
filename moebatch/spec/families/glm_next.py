"""GLM-5.3-Flash (Zhipu AI), text alone: three of four layers recur by Kimi Delta Attention; the
others attend to latents that have no positions, of which indexers choose pools; hidden states are
in several streams."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebatch.spec.families.deepseek import choosing, indexer_types, latent_attention
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kimi import OF_MIXERS
from moebatch.spec.families.kinds import FULL, LINEAR, by_mlp_types
from moebatch.spec.families.parts import corrected_router, mlps
from moebatch.spec.families.recurring import (
    alike_heads,
    conv_width,
    least_fading,
    recurring,
    require_silu,
)
from moebatch.spec.model.blocks import ClampedGate, Streams
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.recurrence import ChannelDelta
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import IN_MODEL, behind, usual_names

_INDEXED = "indexed_attention"
_INTERVAL, _FIRST_SPARSE = 4, 3
_USUAL_BOUND = -5.0
_BOUND, _TEXT = "linear_lower_bound", "text_config"
_IN_AN_OBJECT = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    _BOUND: "gate_lower_bound",
}


def _reworded(keys: ConfigKeys) -> dict[str, Any]:
    """Sizes of layers that recur may stand in an object, which then says how far they fade."""
    said = keys.value("linear_attn_config")
    if not isinstance(said, Mapping):
        return {}
    found = {key: said.get(name, keys.value(key)) for key, name in _IN_AN_OBJECT.items()}
    if found[_BOUND] is None and said.get("safe_gate", True):
        found[_BOUND] = _USUAL_BOUND
    return found


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """transformers also reads files that have all this beside everything else."""
    if not isinstance(said := keys.value(_TEXT), Mapping):
        keys.fault(_TEXT, "an object that says what the text model is like", said)
    require_silu(keys)
    latent = latent_attention(keys, rotates=False, rotates_neighbours=False, is_positioned=False)
    clamps = (ClampedGate(limit=keys.positive("swiglu_limit")),) * num_layers
    usual = [LINEAR if (layer + 1) % _INTERVAL else _INDEXED for layer in range(num_layers)]
    sparse = by_mlp_types(keys, num_layers, range(_FIRST_SPARSE, num_layers))
    layers = Layers(
        attention=replace(latent, norm_eps=keys.positive("rms_norm_eps")),
        **recurring(keys, usual, _delta, attend=(_INDEXED, FULL)),
        **mlps(keys, num_layers, sparse, num_shared="n_shared_experts"),
        router=corrected_router(keys),
        expert_clamps=clamps,
        mlp_clamps=clamps,
        streams=Streams(
            count=keys.count("hc_mult"),
            num_balancings=keys.count("hc_sinkhorn_iters"),
            eps=keys.positive("hc_eps"),
            averages_last=True,
        ),
    )
    types = _indexer_types(keys, num_layers, layers.recurrent_layers)
    return choosing(layers, keys, types, pool=_pool(keys))


def _pool(keys: ConfigKeys) -> int:
    pool = keys.count("index_kpool")
    keys.require_multiple("index_topk", keys.count("index_topk"), "index_kpool", pool)
    return pool


def _indexer_types(keys: ConfigKeys, num_layers: int, recurrent: Sequence[int]) -> Sequence[str]:
    """Layers that recur have no indexer; transformers hands a choice on to the next layer alone."""
    types = indexer_types(keys, num_layers)
    for layer, kind in enumerate(types):
        hands_on = layer and layer - 1 not in recurrent and types[layer - 1] == "full"
        if kind == "shared" and layer not in recurrent and not hands_on:
            message = f"layer {layer} shares the choice of the one before, which makes none"
            keys.wrong("indexer_types", message)
    return types


def _delta(keys: ConfigKeys) -> ChannelDelta:
    """Gates and fading go through as many numbers as a head has."""
    heads, head_dim = keys.count("linear_num_heads"), keys.count("linear_head_dim")
    return ChannelDelta(
        **alike_heads(heads, head_dim),
        conv_width=conv_width(keys, "linear_conv_kernel_dim"),
        rank=head_dim,
        least_fading=least_fading(keys, _BOUND) if keys.value(_BOUND) is not None else None,
    )


_IN_A_GATE = ("delta_a", "delta_a_wide", "recurrent_step", "recurrent_decay")
"""Weights that transformers holds in a part of their own."""
_NAMES = usual_names(
    {
        **behind("self_attn.", OF_MIXERS),
        **{
            role: (f"self_attn.{OF_MIXERS[role]}", f"self_attn.forget_gate.{OF_MIXERS[role]}")
            for role in _IN_A_GATE
        },
        "index_pool_weight": "self_attn.indexer.index_kpool_compress_gate",
        "index_pool_bias": "self_attn.indexer.index_kpool_compress_ape",
        **{
            f"{norm}_streams{end}": (f"hc_{part}_{name}", f"{part}_hc.{name}")
            for norm, part in (("input_norm", "attn"), ("mlp_norm", "ffn"))
            for end, name in (("", "fn"), ("_base", "base"), ("_scale", "scale"))
        },
    },
    shared=("mlp.shared_experts",),
)
GLM5_NEXT = FamilySpec(
    architecture="Glm5NextForConditionalGeneration",
    model_type="glm5_next",
    config_type="glm5_next_text",
    defaults={"index_topk_freq": 1, "index_skip_topk_offset": 2},
    within=f"{_TEXT}.",
    beside=("model_type", "torch_dtype", "tie_word_embeddings", _TEXT),
    computed={"index_kpool_always_select_tail": (True,), "qk_rope_head_dim": (0,)},
    reworded=_reworded,
    layers=_layers,
    names=_NAMES.also_under(IN_MODEL),
)
"""Images and videos are not read: its vision tensors are left alone, as are layers behind the last
one."""
