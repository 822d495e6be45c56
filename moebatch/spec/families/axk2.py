"""A.X-K2 (SK Telecom): DeepSeek-V3.2's layers, whose norms weigh what they make, and whose gates of
attention lie with queries."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moebatch.spec.families.deepseek import DEEPSEEK_V3, choosing, latent_attention, latent_layers
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import corrected_router
from moebatch.spec.model.blocks import NormGates
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import InLayers

_GROUPS = ("n_group", "topk_group")
_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GATES = {"down": ("W_down", "mlp.fc1"), "up": ("W_up", "mlp.fc2")}
"""As released files call them, and as transformers does."""


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    latent = latent_attention(keys, rotates_neighbours=True)
    if latent.query_rank is None:
        keys.fault("q_lora_rank", "a number, since gates lie with compressed queries", None)
    latent = replace(latent, gate="with queries", joins_compressed=True)
    router = corrected_router(keys)
    if router.groups is not None:
        router = replace(router, groups=replace(router.groups, others_are_zero=True))
    layers = latent_layers(keys, num_layers, latent, router)
    gates = NormGates(rank=keys.count("gated_norm_rank"))
    return choosing(replace(layers, norm_gates=gates), keys, ["full"] * num_layers)


def _one_group(keys: ConfigKeys) -> Mapping[str, Any]:
    """Without groups all experts are one."""
    has_none = all(keys.value(key) is None for key in _GROUPS)
    return dict.fromkeys(_GROUPS, 1) if has_none else {}


def _norms() -> InLayers:
    """Those without gates, in layers without experts, have names of their own."""
    return {role: (f"{norm}.norm.weight", f"{norm}.weight") for role, norm in _NORMS.items()} | {
        f"{role}_gate_{matrix}": [f"{norm}.{name}.weight" for name in names]
        for role, norm in _NORMS.items()
        for matrix, names in _GATES.items()
    }


AXK2 = FamilySpec(
    architecture="AXK2ForCausalLM",
    model_type="axk2",
    defaults={"first_k_dense_replace": 1},
    reworded=_one_group,
    layers=_layers,
    names=DEEPSEEK_V3.names.with_names(
        {
            **_norms(),
            "gated_q_b": ("self_attn.q_b_proj.weight", "self_attn.q_gate_proj.weight"),
        }
    ),
)
"""Layers behind the last one, which guess further tokens ahead, are not read."""
