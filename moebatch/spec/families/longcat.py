"""LongCat-Flash (Meituan): a layer of the file attends twice, with an MLP behind each, and has
experts behind the first whose output is added at its end. That is two layers here, the first with
experts and the MLP in the place of a shared one.

Experts behind those of the file give back what they see ("zero-computation experts"); latents and
queries are multiplied by what makes up for their width.
"""

from dataclasses import replace

from moebatch.spec.families.deepseek import LATENT_NAMES, latent_attention
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import LAYER, TensorNames, separate_experts

_HALVES = 2
_NOT_READ = "false, since biases of gates are not read"


def _layers(keys: ConfigKeys, num_in_file: int) -> Layers:
    num_layers = _HALVES * num_in_file
    if keys.value("num_halves") not in (None, num_layers):
        keys.fault("num_halves", f"{num_layers}, twice num_layers", keys.value("num_halves"))
    if keys.value("router_bias"):
        keys.fault("router_bias", _NOT_READ, keys.value("router_bias"))
    if keys.value("zero_expert_type") not in (None, "identity"):
        keys.fault("zero_expert_type", "identity", keys.value("zero_expert_type"))
    mlp = Mlp(width=keys.count("intermediate_size"))
    attention = latent_attention(keys, rotates_neighbours=True)
    hidden, query_rank = keys.count("hidden_size"), keys.count("q_lora_rank")
    usual = attention.head_dim**-0.5 if attention.score_scale is None else attention.score_scale
    return Layers(
        attention=replace(
            attention,
            score_scale=usual * (hidden / query_rank) ** 0.5,
            latent_scale=(hidden / attention.kv_rank) ** 0.5,
        ),
        sliding_windows=(None,) * num_layers,
        moe_layers=tuple(range(0, num_layers, _HALVES)),
        file_numbers=tuple(divmod(layer, _HALVES) for layer in range(num_layers)),
        expert=Mlp(width=keys.count("moe_intermediate_size")),
        shared_expert=mlp,
        dense=mlp,
        adds_experts_late=True,
        router=Router(
            has_correction=True,
            scale=keys.positive("routed_scaling_factor"),
            num_identities=keys.count_or_zero("zero_expert_num"),
            has_exact_logits=True,
            has_exact_weights=True,
        ),
    )


_MLPS = {"shared": "mlps.0", "mlp": "mlps.1"}
LONGCAT_FLASH = FamilySpec(
    architecture="LongcatFlashForCausalLM",
    model_type="longcat_flash",
    spelling={"num_hidden_layers": "num_layers", "num_halves": "num_hidden_layers"},
    synonyms={"qk_rope_head_dim": ("head_dim",)},
    layers=_layers,
    names=TensorNames(
        roles={
            "embedding": ("model.embed_tokens.weight",),
            "final_norm": ("model.norm.weight",),
            "head": ("lm_head.weight",),
            "input_norm": (LAYER + "input_layernorm.{mlp}.weight",),
            "mlp_norm": (LAYER + "post_attention_layernorm.{mlp}.weight",),
            **{role: (f"{LAYER}self_attn.{{mlp}}.{name}",) for role, name in LATENT_NAMES.items()},
            **{
                f"o{end}": (f"{LAYER}self_attn.{{mlp}}.o_proj.{kind}",)
                for end, kind in (("", "weight"), ("_bias", "bias"))
            },
            **{
                f"{part}_{role}": (f"{LAYER}{name}.{role}_proj.weight",)
                for part, name in _MLPS.items()
                for role in ("gate", "up", "down")
            },
            "router": (LAYER + "mlp.router.classifier.weight",),
            "router_correction": (LAYER + "mlp.router.e_score_correction_bias",),
        },
        experts=(
            separate_experts(
                "mlp.experts.{expert}", gate="gate_proj", up="up_proj", down="down_proj"
            ),
        ),
    ),
)
"""Layers that guess further tokens ahead, ``mtp``, are not read, nor are the matrices that
transformers writes of experts which compute nothing."""
