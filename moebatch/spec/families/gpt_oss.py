"""gpt-oss (OpenAI)."""

from dataclasses import replace

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import by_layer_types
from moebatch.spec.families.parts import grouped_attention
from moebatch.spec.model.blocks import ClampedGate, Mlp, Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import LAYER, STACKED_EXPERTS, usual_names

_EXPERTS = LAYER + "mlp.experts."
_ANY = replace(
    STACKED_EXPERTS,
    biases={
        _EXPERTS + "gate_up_proj_bias": ("gate_bias", "up_bias"),
        _EXPERTS + "down_proj_bias": ("down_bias",),
    },
    is_interleaved=True,
)
_BY_ROWS = replace(_ANY, formats=("mxfp4",))
"""As released: [E, 2F, D] and [E, D, F]."""
_BY_COLUMNS = _ANY.across("gate", "up", "down")
"""As transformers holds and saves them: [E, D, 2F] and [E, F, D]."""


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    clamped = ClampedGate(
        limit=keys.positive("swiglu_limit"), alpha=keys.positive("swiglu_alpha"), added=1.0
    )
    return Layers(
        attention=grouped_attention(keys, biases="attention_bias", has_sink_scores=True),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("intermediate_size"), bias=True),
        expert_clamps=(clamped,) * num_layers,
        router=Router(norm_order=1.0, bias=True),
        norm=Norm(rounds_once=True),
        sliding_windows=by_layer_types(keys, num_layers, lambda layer: layer % 2 == 0),
    )


GPT_OSS = FamilySpec(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    defaults={"torch_dtype": "bfloat16"},
    layers=_layers,
    names=usual_names(
        {
            "router": "mlp.router.weight",
            "router_bias": "mlp.router.bias",
        },
        experts=(_BY_ROWS, _BY_COLUMNS),
    ),
)
