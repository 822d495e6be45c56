"""LongCat-Flash (Meituan): a layer of the file attends twice, with an MLP behind each, and has
experts behind the first whose output is added at its end. That is two layers here, the first with
experts and the MLP in the place of a shared one.

Experts behind those of the file give back what they see ("zero-computation experts"); latents and
queries are multiplied by what makes up for their width.
"""

from dataclasses import replace

from moebatch.spec.families.deepseek import latent_attention
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import OF_LATENTS, USUAL_EXPERTS, behind, usual_names

_HALVES = 2
_NOT_READ = "false, since biases of gates are not read"


def _layers(keys: ConfigKeys, num_in_file: int) -> Layers:
    num_layers = _HALVES * num_in_file
    if keys.value("num_halves") not in (None, num_layers):
        keys.fault("num_halves", f"{num_layers}, twice num_layers", keys.value("num_halves"))
    if keys.value("router_bias"):
        keys.fault("router_bias", _NOT_READ, keys.value("router_bias"))
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


LONGCAT_FLASH = FamilySpec(
    architecture="LongcatFlashForCausalLM",
    model_type="longcat_flash",
    spelling={"num_hidden_layers": "num_layers", "num_halves": "num_hidden_layers"},
    synonyms={"qk_rope_head_dim": ("head_dim",)},
    computed={"zero_expert_type": ("identity",)},
    layers=_layers,
    names=usual_names(
        {
            "input_norm": "input_layernorm.{mlp}.weight",
            "mlp_norm": "post_attention_layernorm.{mlp}.weight",
            **behind(
                "self_attn.{mlp}.", {**OF_LATENTS, "o": "o_proj.weight", "o_bias": "o_proj.bias"}
            ),
            "router": "mlp.router.classifier.weight",
            "router_correction": "mlp.router.e_score_correction_bias",
        },
        mlp=("mlps.1",),
        shared=("mlps.0",),
        experts=USUAL_EXPERTS[:1],
    ),
)
"""Layers that guess further tokens ahead, ``mtp``, are not read, nor are the matrices that
transformers writes of experts which compute nothing."""
