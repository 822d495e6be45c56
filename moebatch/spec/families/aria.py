"""Aria (Rhymes AI): the text of a model that sees."""

from dataclasses import replace

from moebatch.spec.families.family import FamilySpec, grouped_attention
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import STACKED_EXPERTS, stacked_experts, usual_names


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    width, num_shared = keys.count("intermediate_size"), keys.count("num_shared")
    if keys.value("hidden_act") != "silu":  # experts have SiLU all the same
        keys.fault("hidden_act", "silu", keys.value("hidden_act"))
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias"),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=width),
        shared_expert=Mlp(width=num_shared * width, bias=keys.flag("mlp_bias")),
        router=Router(norm_order=1.0),
    )


ARIA_TEXT = FamilySpec(
    architecture="AriaTextForCausalLM",
    model_type="aria_text",
    spelling={
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_topk",
        "num_shared": "moe_num_shared_experts",
    },
    layers=_layers,
    names=usual_names(
        {"router": "mlp.router.weight"},
        shared=("mlp.shared_experts",),
        experts=tuple(
            layout.across("gate", "up", "down")
            for layout in (
                stacked_experts("mlp.experts.", gate_up="fc1.weight", down="fc2.weight"),
                STACKED_EXPERTS,
            )
        ),
    ),
)
"""Experts are [E, D, 2F] and [E, F, D]."""
ARIA = replace(
    ARIA_TEXT.beside_others("AriaForConditionalGeneration", "aria"),
    names=ARIA_TEXT.names.also_under(
        {"model": "language_model.model", "lm_head": "language_model.lm_head"}
    ).also_under({"model": "model.language_model"}),
)
"""As it is released. Images are not read."""
