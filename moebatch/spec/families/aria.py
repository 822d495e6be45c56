"""Aria (Rhymes AI): the text of a model that sees."""

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import grouped_attention, mlps
from moebatch.spec.model.blocks import Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import (
    AROUND_MODEL,
    IN_MODEL,
    STACKED_EXPERTS,
    stacked_experts,
    usual_names,
)


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias"),
        **mlps(
            keys, num_layers, width="intermediate_size", num_shared="num_shared", biases="mlp_bias"
        ),
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
    computed={"hidden_act": ("silu",)},  # experts have it, whatever files say
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
ARIA = ARIA_TEXT.beside_others(
    "AriaForConditionalGeneration",
    "aria",
    names=ARIA_TEXT.names.also_under(AROUND_MODEL).also_under(IN_MODEL),
)
"""As it is released. Images are not read."""
