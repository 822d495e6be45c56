"""Nemotron-H with experts, which is Nemotron 3 (NVIDIA): most layers are Mamba-2, the others attend
without positions.

Files number what mixes tokens, experts and MLPs one by one, each with a norm of its own before it
and what it makes added behind. That is what a layer does here: two neighbours are one, and what
mixes tokens before another of its kind is one without experts and an MLP.

Steps of Mamba-2 may be of any length, for prompts as for answers, as ``time_step_limit`` has it.
``time_step_min`` is for training: transformers stretches steps to it all the same, those of prompts
alone.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import corrected_router, grouped_attention
from moebatch.spec.families.recurring import (
    recurring_in,
    require_attention,
    require_silu,
    state_space,
)
from moebatch.spec.model.blocks import Mlp, Norm
from moebatch.spec.model.config_keys import MAX_LAYERS, ConfigKeys
from moebatch.spec.model.recurrence import StateSpace
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import (
    AROUND_MODEL,
    LAYER,
    OF_MAMBA,
    ExpertLayout,
    TensorNames,
)

_KINDS: Mapping[str, str] = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
}
"""Letters of ``hybrid_override_pattern`` by what ``layers_block_type`` calls them."""
_NOT_RUN: Mapping[str, str] = {
    "attention_bias": "false, since biases of attention are not read",
    "sliding_window": "null, since layers of this family see everything",
}
_USUAL = "ME*-"
_LAYERS = re.compile("([M*])([E-]?)")
_ALL = re.compile("([M*][E-]?)+")
_ROLES = ("up", "down")


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """``num_hidden_layers`` is not looked at, nor does transformers: kinds are counted."""
    layers = [*_LAYERS.finditer(_pattern(keys))]
    mixers, mlps = zip(*(found.groups() for found in layers), strict=True)
    require_attention(keys, "*" in mixers)
    require_silu(keys, "mamba_hidden_act")
    for key, expected in _NOT_RUN.items():
        if keys.value(key):
            keys.fault(key, expected, keys.value(key))
    has_biases = keys.flag("mlp_bias")
    shared, dense = (
        Mlp(width=keys.count(key), roles=_ROLES, bias=has_biases)
        for key in ("moe_shared_expert_intermediate_size", "intermediate_size")
    )
    return Layers(
        attention=grouped_attention(keys, rotates=False),
        sliding_windows=(None,) * len(layers),
        **recurring_in(keys, _places(mixers, "M"), _state_space),
        moe_layers=_places(mlps, "E"),
        bare_layers=_places(mlps, ""),
        file_numbers=tuple((found.start(), found.end() - 1) for found in layers),
        expert=Mlp(width=keys.count("moe_intermediate_size"), roles=_ROLES),
        latent_width=keys.count_or_none("moe_latent_size"),
        latent_bias=has_biases,
        shared_expert=shared,
        dense=dense if "-" in mlps else None,
        router=corrected_router(keys),
        norm=Norm(rounds_once=True),
    )


def _state_space(keys: ConfigKeys) -> StateSpace:
    return state_space(keys, keys.count("mamba_n_heads"), keys.count("mamba_d_head"))


def _places(letters: tuple[str, ...], letter: str) -> tuple[int, ...]:
    return tuple(place for place, each in enumerate(letters) if each == letter)


def _pattern(keys: ConfigKeys) -> str:
    """A letter for each number of the file."""
    types, pattern = keys.value("layer_types"), keys.value("hybrid_override_pattern")
    if types is not None:
        are_known = isinstance(types, list) and all(
            isinstance(kind, str) and kind in _KINDS for kind in types
        )
        if not are_known:
            keys.fault("layer_types", "a list of " + ", ".join(_KINDS), types)
            return _USUAL
        key, pattern = "layer_types", "".join(_KINDS[kind] for kind in types)
    else:
        key, pattern = "hybrid_override_pattern", _USUAL if pattern is None else pattern
    if isinstance(pattern, str) and len(pattern) <= MAX_LAYERS and _ALL.fullmatch(pattern):
        return pattern
    keys.fault(
        key,
        f"up to {MAX_LAYERS} layers that are Mamba-2 (M) or attend (*), behind each of which may "
        "be one with experts (E) or an MLP (-)",
        pattern,
    )
    return _USUAL


_MIXER, _MLP_LAYER = LAYER + "mixer.", LAYER.format(layer="{mlp}")
_MLP = _MLP_LAYER + "mixer."
_PROJECTIONS = {
    "latent_in": "fc1_latent_proj",
    "latent_out": "fc2_latent_proj",
    **{f"shared_{role}": f"shared_experts.{role}_proj" for role in _ROLES},
    **{f"mlp_{role}": f"{role}_proj" for role in _ROLES},
}
_EXPERTS = {role: f"{_MLP}experts.{{expert}}.{role}_proj.weight" for role in _ROLES}
_STACKS = {role: f"{_MLP}experts.{role}_proj" for role in _ROLES}
NEMOTRON_H = FamilySpec(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    defaults={"num_hidden_layers": len(_USUAL)},
    spelling={
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "mlp_hidden_act",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
        "mamba_chunk_size": "chunk_size",
    },
    synonyms={
        "mamba_n_groups": ("mamba_n_groups",),
        "mamba_d_conv": ("mamba_d_conv",),
        "mamba_conv_bias": ("mamba_conv_bias",),
        "mamba_chunk_size": ("mamba_chunk_size",),
        "time_step_limit": ("mamba_dt_limit",),
    },
    layers=_layers,
    names=TensorNames(
        roles={
            "embedding": ("model.embeddings.weight",),
            "final_norm": ("model.norm_f.weight",),
            "head": ("lm_head.weight",),
            "input_norm": (LAYER + "norm.weight",),
            "mlp_norm": (_MLP_LAYER + "norm.weight",),
            **{role: (f"{_MIXER}{role}_proj.weight",) for role in "qkvo"},
            **{role: (_MIXER + name,) for role, name in OF_MAMBA.items()},
            "router": (_MLP + "gate.weight",),
            "router_correction": (_MLP + "gate.e_score_correction_bias",),
            **{
                f"{role}{end}": (f"{_MLP}{name}.{kind}",)
                for role, name in _PROJECTIONS.items()
                for end, kind in (("", "weight"), ("_bias", "bias"))
            },
        },
        experts=(
            ExpertLayout(weights={name: (role,) for role, name in _EXPERTS.items()}),
            ExpertLayout(
                weights={name: (role,) for role, name in _STACKS.items()}, is_stacked=True
            ),
        ),
        in_gguf={
            "mlp_norm": "attn_norm.weight",
            "latent_in": "ffn_latent_down.weight",
            "latent_out": "ffn_latent_up.weight",
        },
    ).also_under({"model": "backbone"}),
)
"""As released, and as transformers holds it in memory. Layers that guess further tokens ahead,
``mtp``, are not read."""
NEMOTRON_OMNI = NEMOTRON_H.beside_others(
    "NemotronH_Omni_Reasoning_V3",
    "nemotron_h_omni",
    else_within="llm_config.",
    beside=("model_type", "torch_dtype"),
    names=NEMOTRON_H.names.also_under(AROUND_MODEL | {"backbone": "language_model.backbone"}),
)
NEMOTRON_NANO_OMNI = replace(
    NEMOTRON_OMNI,
    architecture="NemotronH_Nano_Omni_Reasoning_V3",
    other_types=("NemotronH_Nano_Omni_Reasoning_V3",),
)
NEMOTRON_SUPER_OMNI = replace(NEMOTRON_OMNI, architecture="NemotronH_Super_Omni_Reasoning_V3")
"""The former is the class of transformers, the latter are those of code of their own, which is not
run. What sees and what hears is not read."""
